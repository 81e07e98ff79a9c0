package base

import (
	"fmt"
	"slices"
	"strings"
)

// Enum holds the texts of a type's values; a number without a text is not a value.
type Enum[T ~uint8] struct {
	Name  string // of the type
	Texts []string
}

// Valid reports whether v is a value.
func (e *Enum[T]) Valid(v T) bool { return int(v) < len(e.Texts) && e.Texts[v] != "" }

// Text returns the text of a value, and the type with the number of anything else.
func (e *Enum[T]) Text(v T) string {
	if e.Valid(v) {
		return e.Texts[v]
	}
	return fmt.Sprintf("%s(%d)", e.Name, uint8(v))
}

// Parse returns the value with a text.
func (e *Enum[T]) Parse(text []byte) (v T, ok bool) {
	i := slices.Index(e.Texts, string(text))
	return T(max(i, 0)), i >= 0 && len(text) > 0
}

// Allowed returns all texts, such as "a, b or c".
func (e *Enum[T]) Allowed() string {
	texts := slices.DeleteFunc(slices.Clone(e.Texts), func(s string) bool { return s == "" })
	last := len(texts) - 1
	return strings.Join(texts[:last], ", ") + " or " + texts[last]
}
