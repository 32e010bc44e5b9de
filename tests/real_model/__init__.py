"""How answers of a real language model (`smollm2`) are judged."""
