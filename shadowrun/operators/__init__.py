"""Facts on operators that are known without running them."""
