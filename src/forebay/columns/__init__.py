"""Samples that are rows of columns: Arrow tables, tensors and datasets of Hugging Face."""
