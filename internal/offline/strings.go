package offline

import (
	"reflect"
	"strings"
	"time"
	"unicode/utf8"
)

// spell gives each byte of the strings of a line that are not all UTF-8 a character. It returns
// false if all are.
func (l *Line) spell() bool {
	if everyString(reflect.ValueOf(l), func(s string) (string, bool) { return s, utf8.ValidString(s) }) {
		return false
	}
	l.Bytes = true
	everyString(reflect.ValueOf(l), func(s string) (string, bool) {
		var b strings.Builder
		for i := range len(s) {
			b.WriteRune(rune(s[i]))
		}
		return b.String(), true
	})
	return true
}

// unspell undoes spell. It returns false if that has not written the line.
func (l *Line) unspell() bool {
	l.Bytes = false
	return everyString(reflect.ValueOf(l), func(s string) (string, bool) {
		b := make([]byte, 0, len(s))
		for _, r := range s {
			if r > 0xff {
				return s, false
			}
			b = append(b, byte(r))
		}
		return string(b), true
	})
}

// everyString replaces all strings within v by what f makes of them, until f returns false.
func everyString(v reflect.Value, f func(string) (string, bool)) bool {
	switch v.Kind() {
	case reflect.Pointer:
		return v.IsNil() || everyString(v.Elem(), f)
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			return true
		}
		for i := range v.NumField() {
			if !everyString(v.Field(i), f) {
				return false
			}
		}
	case reflect.Slice:
		if v.Type().Elem().Kind() != reflect.String {
			return v.Type().Elem().Kind() != reflect.Struct || everyElement(v, f)
		}
		return everyElement(v, f)
	case reflect.Map:
		return everyEntry(v, f)
	case reflect.String:
		s, ok := f(v.String())
		if ok && s != v.String() {
			v.SetString(s)
		}
		return ok
	}
	return true
}

func everyElement(v reflect.Value, f func(string) (string, bool)) bool {
	for i := range v.Len() {
		if !everyString(v.Index(i), f) {
			return false
		}
	}
	return true
}

// everyEntry does what everyString does for a map of strings to strings or numbers. It makes a new
// map, since others may use the old one.
func everyEntry(v reflect.Value, f func(string) (string, bool)) bool {
	if v.IsNil() {
		return true
	}
	next := reflect.MakeMapWithSize(v.Type(), v.Len())
	for it := v.MapRange(); it.Next(); {
		key, ok := f(it.Key().String())
		if !ok {
			return false
		}
		value := reflect.New(v.Type().Elem()).Elem()
		value.Set(it.Value())
		if !everyString(value, f) {
			return false
		}
		next.SetMapIndex(reflect.ValueOf(key), value)
	}
	v.Set(next)
	return true
}
