"""Results of a load: records, figures, reports, comparisons."""
