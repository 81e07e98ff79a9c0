package listing

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/store"
	"codeq/internal/wire"
)

// MostDeadKinds bounds the kinds of a DeadKinds, and queuesOfKind the queues of each. heldKinds
// bounds the kinds in memory meanwhile.
const (
	MostDeadKinds = 1000
	queuesOfKind  = 10
	heldKinds     = 1 << 16
)

// DeadKinds reads how many dead letters a shard has by the kinds of their errors, in a queue or
// all. It reads the counts of each bucket, and no dead letter.
type DeadKinds struct {
	Queue string // "": all
	Kinds []DeadKind

	number uint32 // of the queue; 0: it has none
}

// DeadKind counts the dead letters of a kind in some queues.
type DeadKind struct {
	Text   string `json:",omitzero"`
	Other  bool   `json:",omitzero"` // they have no kind of their own; Text is ""
	Count  keys.KindCount
	Queues []queueDead // those with the most, the most first
}

// queueDead is how many dead letters of a kind a queue has.
type queueDead struct {
	Queue string
	Count uint64
}

// Visit finds the number of the queue.
func (d *DeadKinds) Visit(rules *engine.State, _ *store.Snapshot) {
	d.number, _ = rules.Names.CountsOf(d.Queue)
}

// Look sums up the counts.
func (d *DeadKinds) Look(v *store.Snapshot, stop func() bool) (again bool, err error) {
	prefix := []byte{keys.Buckets, keys.Dead}
	if d.Queue != "" {
		prefix = keys.AppendBuckets(nil, keys.Dead, d.number)
	}
	names, err := newAscent(v.Reader(), keys.Queue)
	if err != nil {
		return false, err
	}
	defer names.close()
	texts, err := newAscent(v.Reader(), keys.DeadKind)
	if err != nil {
		return false, err
	}
	defer texts.close()
	sum, of := kindSum{}, newQueueKinds(0)
	read := 0
	err = store.ScanPrefix(v.Reader(), prefix, func(key, value []byte) error {
		if read++; read%usedAtOnce == 0 && stop() {
			return errStopped
		}
		_, number, _, err := keys.ParseBucket(key)
		b, valueErr := keys.ParseBucketValue(value)
		if err := errors.Join(err, valueErr); err != nil {
			return fmt.Errorf("%w: %w", base.ErrCorrupt, err)
		}
		if number != of.number {
			if err := of.addTo(sum, names, texts); err != nil {
				return err
			}
			of = newQueueKinds(number)
		}
		of.add(&b)
		return nil
	})
	if err == nil {
		err = of.addTo(sum, names, texts)
	}
	d.Kinds = sum.list()
	return false, err
}

// Append appends the name of the queue.
func (d *DeadKinds) Append(dst []byte) []byte { return wire.AppendBytes(dst, d.Queue) }

func (d *DeadKinds) Read(r *wire.Reader) { d.Queue = r.String() }

// AppendReply appends the kinds.
func (d *DeadKinds) AppendReply(dst []byte) []byte { return wire.AppendJSON(dst, d.Kinds) }

// ReadReply is the reverse of AppendReply.
func (d *DeadKinds) ReadReply(r *wire.Reader) { r.JSON(r.Rest(), &d.Kinds) }

// Again does nothing: Look begins anew.
func (d *DeadKinds) Again() {}

// SumKinds sums up the kinds of shards: those with the most dead letters first, and the others
// last.
func SumKinds(shards []DeadKinds) []DeadKind {
	sum := kindSum{}
	for i := range shards {
		for j := range shards[i].Kinds {
			sum.add(&shards[i].Kinds[j])
		}
	}
	return sum.list()
}

// queueKinds has the counts of a queue, by the numbers of its kinds.
type queueKinds struct {
	number uint32
	kinds  map[uint32]*keys.KindCount
}

func newQueueKinds(number uint32) queueKinds {
	return queueKinds{number, make(map[uint32]*keys.KindCount)}
}

// add adds a bucket.
func (q *queueKinds) add(b *keys.BucketValue) {
	uncounted := keys.KindCount{Kind: keys.OtherKinds, Count: b.Size - b.Counted()}
	for _, k := range append(b.Kinds, uncounted) {
		if k.Count == 0 {
			continue
		}
		if have := q.kinds[k.Kind]; have != nil {
			have.Join(&k)
		} else {
			q.kinds[k.Kind] = &k
		}
	}
}

// addTo adds the queue to a sum, by the texts of its kinds.
func (q *queueKinds) addTo(sum kindSum, names, texts ascent) error {
	if len(q.kinds) == 0 {
		return nil
	}
	name, _, err := names.find(keys.AppendNumbered(nil, keys.Queue, q.number))
	if err != nil {
		return err
	}
	for _, number := range slices.Sorted(maps.Keys(q.kinds)) {
		k := *q.kinds[number]
		text, ok := "", false
		if k.Kind != keys.OtherKinds {
			if text, ok, err = texts.find(keys.AppendDeadKind(nil, q.number, k.Kind)); err != nil {
				return err
			}
		}
		k.Kind = 0
		sum.add(&DeadKind{Text: text, Other: !ok, Count: k, Queues: []queueDead{{name, k.Count}}})
	}
	return nil
}

// ascent reads the values of some keys of a range, in their order.
type ascent struct{ it *pebble.Iterator }

func newAscent(r pebble.Reader, prefix byte) (ascent, error) {
	lower, upper := keys.Range(prefix)
	it, err := r.NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
	return ascent{it}, store.Error(err)
}

func (a ascent) find(key []byte) (value string, ok bool, err error) {
	if !a.it.SeekGE(key) || !bytes.Equal(a.it.Key(), key) {
		return "", false, store.Error(a.it.Error())
	}
	b, err := a.it.ValueAndErr()
	return string(b), err == nil, store.Error(err)
}

func (a ascent) close() { _ = a.it.Close() } // its error is that of it.Error

// kindName is the key of a kind in a sum.
type kindName struct {
	text  string
	other bool
}

// kindSum sums up kinds of several queues or shards.
type kindSum map[kindName]*DeadKind

func (s kindSum) add(k *DeadKind) {
	name := kindName{k.Text, k.Other}
	if s[name] == nil && len(s) >= heldKinds {
		name = kindName{other: true}
	}
	have := s[name]
	if have == nil {
		have = &DeadKind{Text: name.text, Other: name.other}
		s[name] = have
	}
	have.Count.Join(&k.Count)
	for _, q := range k.Queues {
		if i := slices.IndexFunc(have.Queues, func(o queueDead) bool { return o.Queue == q.Queue }); i >= 0 {
			have.Queues[i].Count += q.Count
		} else {
			have.Queues = append(have.Queues, q)
		}
	}
	if len(have.Queues) >= 4*queuesOfKind {
		have.cutQueues()
	}
}

// cutQueues leaves the queues with the most.
func (k *DeadKind) cutQueues() {
	slices.SortFunc(k.Queues, func(a, b queueDead) int {
		return cmp.Or(-cmp.Compare(a.Count, b.Count), cmp.Compare(a.Queue, b.Queue))
	})
	k.Queues = k.Queues[:min(len(k.Queues), queuesOfKind)]
}

// Names returns the names of the queues.
func (k *DeadKind) Names() (names []string) {
	for _, q := range k.Queues {
		names = append(names, q.Queue)
	}
	return names
}

// list returns at most MostDeadKinds; the last one has the others, if there are some.
func (s kindSum) list() []DeadKind {
	all := make([]DeadKind, 0, len(s))
	for _, k := range s {
		all = append(all, *k)
	}
	slices.SortFunc(all, func(a, b DeadKind) int {
		if a.Other != b.Other {
			return map[bool]int{false: -1, true: 1}[a.Other]
		}
		return cmp.Or(-cmp.Compare(a.Count.Count, b.Count.Count), cmp.Compare(a.Text, b.Text))
	})
	if len(all) > MostDeadKinds {
		rest := kindSum{}
		for _, k := range all[MostDeadKinds-1:] {
			k.Text, k.Other = "", true
			rest.add(&k)
		}
		all = append(all[:MostDeadKinds-1], *rest[kindName{other: true}])
	}
	for i := range all {
		all[i].cutQueues()
	}
	return all
}
