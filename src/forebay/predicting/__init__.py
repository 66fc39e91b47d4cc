"""The parts of predict: batches of sample ranges, the model, files of predictions."""
