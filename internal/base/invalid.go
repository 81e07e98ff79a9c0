package base

import "fmt"

// Invalid says which value is not allowed.
type Invalid struct {
	Field string
	Value any
	Limit string // the allowed values
}

func (e *Invalid) Error() string {
	return fmt.Sprintf("invalid %s: %v (allowed: %s)", e.Field, e.Value, e.Limit)
}

// NewInvalid returns an Invalid.
func NewInvalid(field string, value any, limit string) *Invalid { return &Invalid{field, value, limit} }
