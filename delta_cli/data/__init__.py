"""Problems and how they reach a model: data sets, the embedded tasks, prompt templates, the tokenizer."""
