package wire

import (
	"bytes"
	"encoding"
	"encoding/json"
	"reflect"
	"strings"
	"unicode/utf8"
)

// JSON has text that is UTF-8, but names are any bytes. What is not UTF-8 is written as characters
// that stand for bytes: U+10FF00 to U+10FFFF, which no text uses. For what uses them nevertheless,
// or their neighbors, characters stand as well. So each string comes back as it was, and whoever
// does not know of this reads something else in the place of what is not UTF-8, as always in JSON.

const (
	firstStandIn = 0x10FF00
	neighbors    = "\xf4\x8f" // what characters from U+10F000 on begin with
)

// MarshalJSON returns the JSON form of a value from which UnmarshalJSON restores all strings.
func MarshalJSON(v any) ([]byte, error) {
	b, err := json.Marshal(v)
	if err != nil || !(bytes.Contains(b, []byte(`\ufffd`)) || bytes.Contains(b, []byte("\ufffd")) || bytes.Contains(b, []byte(neighbors))) {
		return b, err // no string has bytes that are written as something else
	}
	to := copied(reflect.ValueOf(v))
	replace(to, toText)
	return json.Marshal(to.Interface())
}

// UnmarshalJSON decodes what MarshalJSON has written into the value at which v points. Pointers in
// that are nil before: to what they point may be another one afterwards.
func UnmarshalJSON(b []byte, v any) error {
	if err := json.Unmarshal(b, v); err != nil {
		return err
	}
	if bytes.Contains(b, []byte(neighbors)) {
		replace(reflect.ValueOf(v).Elem(), fromText)
	}
	return nil
}

// AppendJSON appends the JSON form of v, which must have one, up to the end of the message or in a
// string of its own.
func AppendJSON(dst []byte, v any) []byte {
	b, err := MarshalJSON(v)
	if err != nil {
		panic("codeq: a value without a JSON form: " + err.Error())
	}
	return append(dst, b...)
}

// JSON decodes b, which r has read, into v.
func (r *Reader) JSON(b []byte, v any) {
	if UnmarshalJSON(b, v) != nil {
		r.Fail()
	}
}

// isPlain reports whether a string is written as it is.
func isPlain(s string) bool { return utf8.ValidString(s) && !strings.Contains(s, neighbors) }

// toText returns a string as it is written.
func toText(s string) string {
	if isPlain(s) {
		return s
	}
	var b strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		if r == utf8.RuneError && n == 1 || strings.HasPrefix(s, neighbors) {
			for i := range n {
				b.WriteRune(firstStandIn + rune(s[i]))
			}
		} else {
			b.WriteString(s[:n])
		}
		s = s[n:]
	}
	return b.String()
}

// fromText returns the string that is written as s.
func fromText(s string) string {
	if !strings.Contains(s, neighbors) {
		return s
	}
	b := make([]byte, 0, len(s))
	for _, r := range s {
		if r >= firstStandIn {
			b = append(b, byte(r))
		} else {
			b = utf8.AppendRune(b, r)
		}
	}
	return string(b)
}

var (
	textMarshaler = reflect.TypeFor[encoding.TextMarshaler]()
	jsonMarshaler = reflect.TypeFor[json.Marshaler]()
)

// isLeaf reports whether values of a type have a JSON form of their own, or no strings.
func isLeaf(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Slice, reflect.Array:
		if t.Elem().Kind() == reflect.Uint8 {
			return true
		}
	case reflect.String, reflect.Pointer, reflect.Interface, reflect.Map, reflect.Struct:
	default:
		return true
	}
	return t.Kind() != reflect.Pointer && (t.Implements(textMarshaler) || t.Implements(jsonMarshaler))
}

// isShown reports whether a field of a struct, or the fields of what it embeds, are in its JSON.
func isShown(of reflect.StructField, f reflect.Value) bool {
	return of.IsExported() || of.Anonymous && f.Kind() == reflect.Struct
}

// copied returns a copy of a value.
func copied(v reflect.Value) reflect.Value {
	to := reflect.New(v.Type()).Elem()
	to.Set(v)
	return to
}

// replace puts what by says in the place of each string of a value that can be set. What the value
// points to stays as it is: it gets a copy.
func replace(at reflect.Value, by func(string) string) {
	if isLeaf(at.Type()) {
		return
	}
	switch at.Kind() {
	case reflect.String:
		at.SetString(by(at.String()))
	case reflect.Pointer:
		if !at.IsNil() {
			to := reflect.New(at.Type().Elem())
			to.Elem().Set(at.Elem())
			replace(to.Elem(), by)
			at.Set(to)
		}
	case reflect.Interface:
		if !at.IsNil() {
			to := copied(at.Elem())
			replace(to, by)
			at.Set(to)
		}
	case reflect.Map:
		if at.IsNil() {
			return
		}
		to := reflect.MakeMapWithSize(at.Type(), at.Len())
		for each := at.MapRange(); each.Next(); {
			k, v := copied(each.Key()), copied(each.Value())
			replace(k, by)
			replace(v, by)
			to.SetMapIndex(k, v)
		}
		at.Set(to)
	case reflect.Slice:
		if at.IsNil() {
			return
		}
		to := reflect.MakeSlice(at.Type(), at.Len(), at.Len())
		reflect.Copy(to, at)
		for i := range to.Len() {
			replace(to.Index(i), by)
		}
		at.Set(to)
	case reflect.Array:
		for i := range at.Len() {
			replace(at.Index(i), by)
		}
	case reflect.Struct:
		for of, f := range at.Fields() {
			if isShown(of, f) {
				replace(f, by)
			}
		}
	}
}
