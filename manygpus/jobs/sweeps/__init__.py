"""Many runs that differ in their options, as arrays of jobs."""
