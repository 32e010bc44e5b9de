"""`dynamo doctor`: gathers facts about this machine for the checks of `dynamo_local.core.doctor`, a module for each
one there, and repairs what is safe. Imports neither vLLM nor torch, and takes less than a second."""
