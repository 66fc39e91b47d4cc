"""The parts of `predict`: batches of ranges of samples, the model, and files of predictions."""
