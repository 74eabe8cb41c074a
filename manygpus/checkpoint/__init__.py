"""What a training saves, when, and how it resumes."""
