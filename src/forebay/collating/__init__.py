"""What `forebay.collate` is made of: rules for fields, padding, and naming what does not fit."""
