"""What makes platforms agree: a program recorded on each under settings that could, with what they cost."""
