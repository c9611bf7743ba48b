"""What each section of the report says: facts of one node in, a section out. Pure."""
