"""Network pieces that torch lacks."""
