"""What requests cost on their way through the gateway: throughput, time to first token, capacity, hostile clients."""
