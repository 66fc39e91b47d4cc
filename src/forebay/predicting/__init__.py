"""predict's own rooms: where samples come from, the model, and the parts that come of them."""
