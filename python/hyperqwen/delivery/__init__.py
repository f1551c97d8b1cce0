"""What carries a profile to another machine: units, container images, and files that start them."""
