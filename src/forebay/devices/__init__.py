"""Copy batches to a device: what is copied when, device memory, page-locked host memory.

- `transfer_flow.py`: PURE: which batch is copied into which slot of the device, and when.
- `device_slab.py`: slots of device memory, leased to the batches in them.
- `device_views.py`: a batch whose tensors lie in a slot of the device.
- `device_api.py`: what is needed of a device; implemented by `cuda.py`, by `pinned_memory.py`, and
  by `forebay.testing.fake_device` for tests.
- `pinned_window.py`: which slots of the slab are page-locked.
- `which_device.py`: the device that an argument names.
"""
