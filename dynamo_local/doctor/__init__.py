"""`dynamo doctor`: a module for each thing that is checked, and repairs of what is safe. In each, `check_...` looks at
this machine and yields findings; the functions that judge what was seen take it as arguments, and are pure. None as an
argument means that it is not known. Imports neither vLLM nor torch, and takes less than a second."""
