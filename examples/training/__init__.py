"""What the example programs share: arguments, checkpoints, metrics, progress, picture and the loop itself."""
