//! Pure decisions: a request and the configuration in, a grant or a refusal out.
