"""The bus between processes: NATS, JetStream, presence, the prefill queue, live settings."""
