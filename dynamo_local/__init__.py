"""dynamo-local: disaggregated, self-scaling LLM serving on one machine, on stock vLLM."""

__version__ = "0.1.0"
