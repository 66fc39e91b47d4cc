"""Copy batches to a device: what is copied when, device memory, page-locked host memory."""
