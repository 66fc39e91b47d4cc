"""What predict is made of: batches of ranges of samples, the model, files of predictions."""
