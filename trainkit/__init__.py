"""What is the same in every stage: who am I, options, data, model, engine, records."""
