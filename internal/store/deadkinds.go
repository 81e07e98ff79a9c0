package store

import (
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/container/numset"
	"codeq/internal/keys"
	"codeq/internal/record"
)

// DeadKinds numbers the kinds of errors of one queue's dead letters, for the counts of its buckets,
// and stores the text of each once.
//
// Invariant: between two groups, a kind exists while a bucket counts a dead letter of it. A number
// is free again when the group that has dropped its kind is sealed.
type DeadKinds struct {
	byText   map[string]*deadKind
	byNumber map[uint32]*deadKind
	taken    numset.Set
	changed  []*deadKind // in the group: new ones, and such that no bucket counts
}

type deadKind struct {
	number  uint32
	text    string
	buckets int  // that count some
	stored  bool // disk has the text, once the group has persisted
	changed bool // on the list
}

// Count counts a dead letter in a bucket, and notes that in its record.
func (d *DeadKinds) Count(v *keys.BucketValue, id keys.ID, died uint64, rec *record.Record) {
	number := d.numberOf(v, record.ErrorKind(rec.Error))
	if v.Add(number, id, died) && number != keys.OtherKinds {
		d.byNumber[number].buckets++
	}
	rec.DeadKind = 1 + number
}

// numberOf returns the number under which a bucket counts a kind.
func (d *DeadKinds) numberOf(v *keys.BucketValue, text string) uint32 {
	k := d.byText[text]
	if k == nil || v.Kind(k.number) == nil {
		own := len(v.Kinds)
		if v.Kind(keys.OtherKinds) != nil {
			own--
		}
		switch {
		case own >= keys.MostKinds:
			return keys.OtherKinds
		case k == nil:
			d.taken.Add(keys.OtherKinds)
			k = d.add(d.taken.Take(), text)
			d.change(k)
		}
	}
	return k.number
}

// CountStored is Count for a dead letter as it is stored. It returns its changed value; nil: its
// record has a kind.
func (d *DeadKinds) CountStored(v *keys.BucketValue, id keys.ID, p keys.Place, value []byte) ([]byte, error) {
	lane, b, ended, err := SplitValue(p, value)
	if err != nil {
		return nil, err
	}
	rec, err := record.Decode(b)
	if err != nil || rec.DeadKind != 0 {
		return nil, err
	}
	d.Count(v, id, ended.At, &rec)
	return JoinValue(p, lane, &rec, ended), nil
}

// Uncount is the opposite of Count.
func (d *DeadKinds) Uncount(v *keys.BucketValue, id keys.ID, died uint64, rec *record.Record) {
	if rec.DeadKind == 0 {
		return
	}
	number := rec.DeadKind - 1
	rec.DeadKind = 0
	if base.Invariants && v.Kind(number) == nil {
		base.Violated("dead letter %s is not counted under kind %d", keys.FormatID(id), number)
	}
	if v.Remove(number, id, died) {
		d.release(number)
	}
}

// Drop empties the counts of a bucket.
func (d *DeadKinds) Drop(v *keys.BucketValue) {
	for i := range v.Kinds {
		d.release(v.Kinds[i].Kind)
	}
	v.Kinds = nil
}

func (d *DeadKinds) add(number uint32, text string) *deadKind {
	if d.byText == nil {
		d.byText, d.byNumber = make(map[string]*deadKind), make(map[uint32]*deadKind)
	}
	k := &deadKind{number: number, text: text}
	d.byText[text], d.byNumber[number] = k, k
	return k
}

// release is called when a bucket counts none of a kind any more.
func (d *DeadKinds) release(number uint32) {
	if k := d.byNumber[number]; k != nil {
		if k.buckets--; k.buckets == 0 {
			d.change(k)
		}
	}
}

func (d *DeadKinds) change(k *deadKind) {
	if !k.changed {
		k.changed = true
		d.changed = append(d.changed, k)
	}
}

// Seal adds the changed texts to the group, under the number of the queue.
func (d *DeadKinds) Seal(w *Writes, queue uint32) {
	for _, k := range d.changed {
		k.changed = false
		if k.buckets > 0 && !k.stored {
			k.stored = true
			w.Set(keys.AppendDeadKind(nil, queue, k.number), []byte(k.text))
		} else if k.buckets == 0 {
			delete(d.byText, k.text)
			delete(d.byNumber, k.number)
			if d.taken.Remove(k.number); k.stored {
				w.Delete(keys.AppendDeadKind(nil, queue, k.number))
			}
		}
	}
	clear(d.changed)
	d.changed = d.changed[:0]
}

// Load takes in a bucket as it is stored. The text of a kind is read when the first bucket counts
// some of it.
func (d *DeadKinds) Load(r pebble.Reader, queue uint32, v *keys.BucketValue) error {
	for i := range v.Kinds {
		number := v.Kinds[i].Kind
		if number == keys.OtherKinds {
			continue
		}
		k := d.byNumber[number]
		if k == nil {
			text, err := Lookup(r, keys.AppendDeadKind(nil, queue, number))
			if err == nil && text == nil {
				err = fmt.Errorf("%w: kind %d of errors of queue %d is missing", base.ErrCorrupt, number, queue)
			}
			if err != nil {
				return err
			}
			d.taken.Add(keys.OtherKinds)
			d.taken.Add(number)
			k = d.add(number, string(text))
			k.stored = true
		}
		k.buckets++
	}
	return nil
}

// Check compares the kinds with disk, and returns the differences.
func (d *DeadKinds) Check(r pebble.Reader, queue uint32) (errs []error) {
	found := 0
	err := ScanPrefix(r, keys.AppendNumbered(nil, keys.DeadKind, queue), func(key, value []byte) error {
		_, number, err := keys.ParseDeadKind(key)
		if k := d.byNumber[number]; k == nil || k.text != string(value) || d.byText[k.text] != k || k.buckets == 0 || k.changed {
			errs = append(errs, fmt.Errorf("kind %d of errors of queue %d is %+v, on disk %q", number, queue, k, value))
		}
		found++
		return err
	})
	if found != len(d.byNumber) || found != len(d.byText) || max(found, d.taken.Len()-1) != found {
		errs = append(errs, fmt.Errorf("queue %d has %d kinds of errors, on disk %d", queue, len(d.byNumber), found))
	}
	if err != nil {
		errs = append(errs, err)
	}
	return errs
}
