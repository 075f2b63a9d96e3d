"""What is known of operators without running them."""
