"""The engine: runs tasks on workers. It knows nothing of training, files or models."""
