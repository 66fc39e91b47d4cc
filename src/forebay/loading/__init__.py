"""The rooms of `forebay.DataLoader`: what a worker does, how batches reach the trainer."""
