"""Commands about requests and the prefill queue."""
