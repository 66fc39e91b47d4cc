"""What loaders and runs show to `forebay top`: small files that a second process reads."""
