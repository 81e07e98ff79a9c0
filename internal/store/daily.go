package store

import (
	"bytes"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/keys"
)

// Daily reads, adds and deletes rows of totals: one for a queue at the end of a day.
type Daily struct {
	reader RangeReader
	rows   bool   // the store may have rows
	added  bool   // the group adds rows: reader does not see them
	swept  uint32 // the day of the last sweep
	from   []byte // where the current sweep goes on; nil: none has begun
	stay   bool   // the current sweep has found rows that stay, or some were added meanwhile
}

// NewDaily returns the rows of a store, which are not loaded.
func NewDaily(in *Reads) Daily { return Daily{reader: in.Range(keys.Daily)} }

// Load reads whether there are rows, and when they were swept.
func (d *Daily) Load() error {
	day, _, err := Value(d.reader.in.Store.DB(), []byte{keys.Daily}, "sweep of totals", keys.ParseNumber)
	if err != nil {
		return err
	}
	d.swept = uint32(day)
	lower, upper := keys.TotalsRows()
	return d.reader.in.Walk(lower, upper, func(*pebble.Iterator, int) (bool, error) {
		d.rows = true
		return false, nil
	})
}

// HasRows reports whether there may be rows.
func (d *Daily) HasRows() bool { return d.rows }

// HasAdded reports whether the group adds rows, which are not read before it has persisted.
func (d *Daily) HasAdded() bool { return d.added }

// Add writes the row of a day of a queue.
func (d *Daily) Add(w *Writes, queue string, v *keys.TotalsValue) {
	w.Set(keys.AppendTotals(nil, queue, v.Day), v.Append(nil))
	d.rows, d.added, d.stay = true, true, true
}

// Last returns the last row of a queue; zero: it has none. A disk error makes the shard fail.
func (d *Daily) Last(queue string) (v keys.TotalsValue) {
	it, err := d.reader.Open()
	if err != nil {
		d.reader.in.Broken = err
		return v
	}
	lower, upper := keys.AppendTotals(nil, queue, 0), keys.AppendTotals(nil, queue, 1<<32-1)
	if it.SeekLTWithLimit(upper, lower) == pebble.IterValid { // not beyond, where many may be deleted
		v, err = d.row(it)
	} else {
		d.reader.in.NoteRead(0)
		err = Error(it.Error())
	}
	if err != nil {
		d.reader.in.Broken = err
	}
	return v
}

// From appends the rows of a queue from a day on.
func (d *Daily) From(queue string, first uint32, dst []keys.TotalsValue) ([]keys.TotalsValue, error) {
	if !d.rows {
		return dst, nil
	}
	it, err := d.reader.Open()
	if err != nil {
		return dst, err
	}
	upper := keys.AppendTotals(nil, queue, 1<<32-1)
	at := it.SeekGEWithLimit(keys.AppendTotals(nil, queue, first), upper)
	for ; at == pebble.IterValid; at = it.NextWithLimit(upper) {
		v, err := d.row(it)
		if err != nil {
			return dst, err
		}
		dst = append(dst, v)
	}
	return dst, Error(it.Error())
}

// row reads the row at which an iterator is.
func (d *Daily) row(it *pebble.Iterator) (v keys.TotalsValue, err error) {
	value, err := it.ValueAndErr()
	if err != nil {
		return v, Error(err)
	}
	d.reader.in.NoteRead(len(value))
	_, day, err := keys.ParseTotalsKey(it.Key())
	if err == nil {
		v, err = keys.ParseTotals(value)
	}
	if err == nil && v.Day != day {
		err = fmt.Errorf("row %x is of day %d", it.Key(), v.Day)
	}
	if err != nil {
		return v, fmt.Errorf("%w: %w", base.ErrCorrupt, err)
	}
	return v, nil
}

// SweepIsDue reports whether rows may be too old.
func (d *Daily) SweepIsDue(today uint32) bool { return d.rows && d.swept < today }

// Sweep deletes rows that are so many days old, until spent returns true. Once a day it reads all.
func (d *Daily) Sweep(w *Writes, today, days uint32, spent func() bool) (all bool, err error) {
	it, err := d.reader.Open()
	if err != nil {
		return false, err
	}
	if d.from == nil {
		d.from, _ = keys.TotalsRows()
		d.stay = d.added
	}
	for valid := it.SeekGE(d.from); valid; valid = it.Next() {
		if spent() {
			d.from = bytes.Clone(it.Key())
			return false, nil
		}
		_, day, err := keys.ParseTotalsKey(it.Key())
		if err != nil {
			return false, fmt.Errorf("%w: %w", base.ErrCorrupt, err)
		}
		d.reader.in.NoteRead(0)
		if day+days <= today {
			w.Delete(it.Key())
		} else {
			d.stay = true
		}
	}
	if err := it.Error(); err != nil {
		return false, Error(err)
	}
	d.from, d.swept, d.rows = nil, today, d.stay || d.added
	w.Set([]byte{keys.Daily}, keys.AppendNumber(nil, uint64(today)))
	return true, nil
}

// Close ends the use of the store for this group.
func (d *Daily) Close() {
	d.reader.Close()
	d.added = false
}
