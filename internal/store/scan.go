package store

import (
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/keys"
)

// Scan visits the entries of a range in order. They are valid during the visit.
func Scan(r pebble.Reader, prefix byte, visit func(key, value []byte) error) error {
	return ScanPrefix(r, []byte{prefix}, visit)
}

// ScanParsed visits the parsed entries of a range in order. An error of a parser matches
// base.ErrCorrupt.
func ScanParsed[K, V any](
	r pebble.Reader, prefix byte, parseKey func([]byte) (K, error), parseValue func([]byte) (V, error), visit func(K, V) error,
) error {
	return Scan(r, prefix, func(key, value []byte) error {
		k, err := parseKey(key)
		v, valueErr := parseValue(value)
		if err := errors.Join(err, valueErr); err != nil {
			return fmt.Errorf("%w: key %x: %w", base.ErrCorrupt, key, err)
		}
		return visit(k, v)
	})
}

// ScanPrefix visits the entries with keys that begin with prefix, in order.
func ScanPrefix(r pebble.Reader, prefix []byte, visit func(key, value []byte) error) error {
	it, err := r.NewIter(&pebble.IterOptions{LowerBound: prefix, UpperBound: keys.GroupEnd(prefix)})
	if err != nil {
		return Error(err)
	}
	defer func() { _ = it.Close() }() // its error is that of it.Error
	for valid := it.First(); valid; valid = it.Next() {
		v, err := it.ValueAndErr()
		if err != nil {
			return Error(err)
		}
		if err := visit(it.Key(), v); err != nil {
			return err
		}
	}
	return Error(it.Error())
}

// Lookup returns a copy of the value of a key, or nil.
func Lookup(r pebble.Reader, key []byte) ([]byte, error) {
	v, closer, err := r.Get(key)
	if errors.Is(err, pebble.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, Error(err)
	}
	b := append(make([]byte, 0, len(v)), v...)
	return b, closer.Close()
}

// Value reads the value of a key; ok is false if there is none. what names it in errors.
func Value[T any](r pebble.Reader, key []byte, what string, parse func([]byte) (T, error)) (v T, ok bool, err error) {
	b, err := Lookup(r, key)
	if err != nil || b == nil {
		return v, false, err
	}
	if v, err = parse(b); err != nil {
		return v, false, fmt.Errorf("%w: %s: %w", base.ErrCorrupt, what, err)
	}
	return v, true, nil
}

// IsForgotten reports whether a store of a cluster says that a node, or a directory, was removed.
func IsForgotten(r pebble.Reader, name string) (bool, error) {
	v, _, err := Value(r, keys.AppendNamed(nil, keys.Session, name), "session", keys.ParseSession)
	return v.Gone != 0, err
}

// Applied returns the index and term of the last log entry in a store of a cluster; 0: there is
// none.
func Applied(r pebble.Reader) (index, term uint64, err error) {
	v, err := Lookup(r, []byte{keys.Applied})
	if err != nil || v == nil {
		return 0, 0, err
	}
	if index, term, err = keys.ParseApplied(v); err != nil {
		return 0, 0, fmt.Errorf("%w: %w", base.ErrCorrupt, err)
	}
	return index, term, nil
}
