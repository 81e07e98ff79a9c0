package convert

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/store"
)

// Two shards both store the ties between their tasks, and agree as long as the stores are of one
// moment:
//
//   - A task that waits for its parents counts those that have not ended for it (range Pending):
//     the parent's shard knows the task (Dependent), or one of the two shards has a message to the
//     other one that is not taken: that the task waits (MsgDepend), or that the parent has ended
//     (MsgEnded).
//   - A parent that is kept for its children counts them (Pinned): those that know (Pin), a message
//     that tells one of them (MsgEnded), a message that one does not need it any more (MsgUnpin),
//     and the parent itself while its children are being told (Telling).
//   - No message is deleted before its receiver has it.
//   - A task pins a parent after both messages about the two, MsgDepend and MsgEnded, are taken.
//
// If a shard is of an earlier moment than another one, a task may wait for ever: its shard has lost
// that a parent has ended, and the message is deleted. Or a parent may be counted twice: its shard
// has lost that it has ended, and the task's shard has counted that. A rebuilt shard may lack any
// entry of these ranges, also about two tasks of its own. If it lacks which messages it has taken,
// those that are left are taken again.

// Contradiction is one between what two shards have stored, or one shard about its tasks.
type Contradiction struct {
	Shard int // that would be changed
	Text  string
}

// Crosscheck finds the contradictions between all shards of a queue. REQUIRES: the stores do not
// change meanwhile.
func Crosscheck(shards []pebble.Reader) (found []Contradiction, err error) {
	c := newCrosscheck(shards)
	err = c.run(true)
	return c.found, err
}

// bond is that a task waits for a parent.
type bond struct{ parent, child keys.ID }

// crosscheck is a running Crosscheck. It takes memory for each message that is not taken, and for
// each parent that is kept for children.
type crosscheck struct {
	shards    []pebble.Reader
	views     []*store.Snapshot
	fixes     []*fix          // by shard; nil: nothing is changed
	found     []Contradiction // if something is changed, those that nothing corrects
	corrected int             // the others

	sent  [][]uint64 // by sender and receiver, the number of the last message
	first [][]uint64 // by sender and receiver, the number of the first message that is stored; 0: none is
	taken [][]uint64 // by receiver and sender, the number of the last message that was taken
	gaps  map[[2]int]bool

	waits  map[bond]bool       // messages that are not taken say so, or that the parent has ended
	pins   map[keys.ID]uint64  // found, by parent; comparePins and pinAgain remove those that agree
	stored map[int][]storedPin // by shard; these are not taken
}

// storedPin is a message that counts as a pin.
type storedPin struct {
	key     []byte
	parent  keys.ID
	instead keys.Message // if the parent is not kept
}

// noMessage takes the place and number of another message, and concerns no task.
var noMessage = keys.Message{Kind: keys.MsgUnpin}

func newCrosscheck(shards []pebble.Reader) *crosscheck {
	c := &crosscheck{
		shards: shards, gaps: make(map[[2]int]bool), waits: make(map[bond]bool), pins: make(map[keys.ID]uint64),
		stored: make(map[int][]storedPin),
	}
	for _, r := range shards {
		c.views = append(c.views, store.NewSnapshot(r))
		c.sent = append(c.sent, make([]uint64, len(shards)))
		c.first = append(c.first, make([]uint64, len(shards)))
		c.taken = append(c.taken, make([]uint64, len(shards)))
	}
	return c
}

// run compares the shards: only the numbers of messages, unless they differ in more.
func (c *crosscheck) run(differ bool) error {
	steps := []func(shard int) error{c.numbers, c.compareNumbers}
	if differ {
		steps = []func(shard int) error{
			c.numbers, c.messages, c.compareNumbers, c.findGaps, c.children, c.countPins, c.comparePins, c.pinAgain, c.dropPins,
		}
	}
	for _, step := range steps {
		for i := range c.shards {
			if err := step(i); err != nil {
				return fmt.Errorf("shard %d: %w", i, err)
			}
		}
	}
	return nil
}

// report notes a contradiction. Reconcile changes the store of the shard.
func (c *crosscheck) report(shard int, format string, args ...any) {
	if c.fixes != nil {
		c.corrected++
		return
	}
	c.found = append(c.found, Contradiction{Shard: shard, Text: fmt.Sprintf(format, args...)})
}

// shardOf is the number of the shard of a task.
func (c *crosscheck) shardOf(id keys.ID) int { return keys.ShardOf(id, len(c.shards)) }

// numbers reads how far a shard has come with the messages.
func (c *crosscheck) numbers(i int) error {
	for kind, numbers := range map[byte][]uint64{keys.Sent: c.sent[i], keys.Inbound: c.taken[i]} {
		if err := store.ScanParsed(c.shards[i], kind, keys.ParseNumbered, keys.ParseNumber, func(other uint32, n uint64) error {
			if int(other) >= len(numbers) {
				return fmt.Errorf("%w: a message number of shard %d", base.ErrCorrupt, other)
			}
			numbers[other] = n
			return nil
		}); err != nil {
			return err
		}
	}
	return nil
}

// messages reads the messages of a shard that are not taken.
func (c *crosscheck) messages(i int) error {
	return store.Scan(c.shards[i], keys.Outbound, func(key, value []byte) error {
		to, seq, err := keys.ParseOutbound(key)
		if err != nil || int(to) >= len(c.shards) {
			return fmt.Errorf("%w: malformed message key %x", base.ErrCorrupt, key)
		}
		if c.first[i][to] == 0 {
			c.first[i][to] = seq
		}
		c.sent[i][to] = max(c.sent[i][to], seq)
		if seq <= c.taken[to][i] {
			return nil
		}
		m, err := keys.ParseMessage(value)
		if err != nil {
			return fmt.Errorf("%w: %w", base.ErrCorrupt, err)
		}
		return c.message(i, bytes.Clone(key), &m)
	})
}

// message notes the ties in a message that is not taken.
func (c *crosscheck) message(i int, key []byte, m *keys.Message) error {
	instead := noMessage
	switch m.Kind {
	case keys.MsgDepend, keys.MsgEnded:
		pinned, err := has(c.shards[c.shardOf(m.Child)], keys.AppendPin(nil, m.Child, m.Parent))
		if err != nil {
			return err
		}
		if pinned {
			c.report(i, "a message about tasks %s and %s was taken, and its receiver has lost that", keys.FormatID(m.Parent), keys.FormatID(m.Child))
			return c.fix(i, func(f *fix) { f.set(key, noMessage.Append(nil)) })
		}
		c.waits[bond{m.Parent, m.Child}] = true
		if m.Kind == keys.MsgDepend || m.Outcome != keys.ParentPinned {
			return nil
		}
		instead = *m
		instead.Outcome = keys.ParentDone
	case keys.MsgUnpin:
		if m.Parent == (keys.ID{}) {
			return nil
		}
	default:
		return nil
	}
	c.pins[m.Parent]++
	c.stored[i] = append(c.stored[i], storedPin{key, m.Parent, instead})
	return nil
}

// compareNumbers compares the numbers of a shard's last messages with those that the receivers have
// taken: the shard continues after the larger ones.
func (c *crosscheck) compareNumbers(i int) error {
	for to := range c.shards {
		last, taken := c.sent[i][to], c.taken[to][i]
		if taken <= last {
			continue
		}
		c.report(i, "shard %d has taken message %d, and this shard has lost those after %d: it may repeat the operations that sent them", to, taken, last)
		c.sent[i][to] = taken
		if err := c.fix(i, func(f *fix) { f.number(keys.Sent, to, taken) }); err != nil {
			return err
		}
	}
	return nil
}

// findGaps finds the messages of a shard that are deleted and that, as far as the receiver knows,
// were not taken. Their content is not known: entries that follow from records are derived
// nevertheless; a task that such a message produced is gone, unless a repair has only lost that the
// message was taken.
func (c *crosscheck) findGaps(i int) error {
	for to := range c.shards {
		first, taken := c.first[i][to], c.taken[to][i]
		if first == 0 {
			first = c.sent[i][to] + 1
		}
		if taken+1 >= first {
			continue
		}
		c.gaps[[2]int{i, to}] = true
		c.found = append(c.found, Contradiction{Shard: to, Text: fmt.Sprintf(
			"messages %d to %d of shard %d are missing, which has deleted them: tasks that they produced may be gone", taken+1, first-1, i)})
		if err := c.fix(to, func(f *fix) { f.number(keys.Inbound, i, first-1) }); err != nil {
			return err
		}
	}
	return nil
}

// children compares the waiting tasks of a shard with the entries in the shards of their parents.
func (c *crosscheck) children(i int) error {
	lower, upper := keys.Range(keys.Blocked)
	it, err := c.shards[i].NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
	if err != nil {
		return store.Error(err)
	}
	defer func() { _ = it.Close() }() // its error is that of it.Error
	for valid := it.First(); valid; {
		queue, scope, id, err := keys.ParseGrouped(it.Key())
		if err != nil {
			return fmt.Errorf("%w: %w", base.ErrCorrupt, err)
		}
		if scope != 0 { // it waits for a turn, or for room
			valid = it.SeekGE(keys.AppendGrouped(nil, keys.Blocked, queue+1, 0, keys.ID{}))
			continue
		}
		value, err := it.ValueAndErr()
		if err != nil {
			return store.Error(err)
		}
		_, b, err := keys.SplitLane(value)
		var rec record.Record
		if err == nil {
			rec, err = record.Decode(b)
		}
		if err != nil {
			return fmt.Errorf("%w: task %s: %w", base.ErrCorrupt, keys.FormatID(id), err)
		}
		if err := c.child(i, queue, id, &rec); err != nil {
			return err
		}
		valid = it.Next()
	}
	return store.Error(it.Error())
}

// child compares the entries about a task that waits for its parents.
func (c *crosscheck) child(i int, queue uint32, id keys.ID, rec *record.Record) error {
	r := c.shards[i]
	b, err := store.Lookup(r, keys.AppendByID(nil, keys.Pending, id))
	var counted uint64
	if err == nil && b != nil {
		counted, err = keys.ParseNumber(b)
	}
	if err != nil || counted == keys.PendingCanceled {
		return err
	}
	parents := slices.Clone(rec.Parents)
	slices.SortFunc(parents, func(a, b [record.IDLen]byte) int { return bytes.Compare(a[:], b[:]) })
	parents = slices.Compact(parents)
	var others []keys.ID // parents without an entry or a message about the task
	gap := false
	for _, p := range parents {
		at := c.shardOf(p)
		awaited := c.waits[bond{p, id}]
		if !awaited {
			if awaited, err = has(c.shards[at], keys.AppendDependent(nil, p, id)); err != nil {
				return err
			}
		}
		if !awaited {
			others = append(others, p)
			gap = gap || c.gaps[[2]int{i, at}] || c.gaps[[2]int{at, i}]
		}
	}
	awaited := uint64(len(parents) - len(others))
	if counted == awaited && counted > 0 && !gap {
		return nil
	}
	wake := keys.AppendGrouped(nil, keys.Wake, queue, 0, id)
	if goesOn, err := has(r, wake); err != nil || goesOn {
		return err
	}
	switch {
	case counted > awaited || counted == 0:
		c.report(i, "task %s waits for %d parents, and %d know it: it may wait for ever", keys.FormatID(id), counted, awaited)
	case counted < awaited:
		c.report(i, "task %s waits for %d parents, and %d have not ended for it: one may be counted twice", keys.FormatID(id), counted, awaited)
	}
	if c.fixes == nil {
		return nil
	}
	ask := others[:0]
	for _, p := range others {
		if pinned, err := has(r, keys.AppendPin(nil, id, p)); err != nil {
			return err
		} else if pinned { // it knows that the parent has ended
			continue
		}
		canceled, err := c.cancels(p, rec.OnDead)
		if err != nil {
			return err
		}
		if canceled {
			return c.fix(i, func(f *fix) {
				f.set(keys.AppendByID(nil, keys.Pending, id), keys.AppendNumber(nil, keys.PendingCanceled))
				f.set(wake, []byte{keys.WakeCancel})
			})
		}
		ask = append(ask, p)
	}
	return c.fix(i, func(f *fix) {
		if awaited += uint64(len(ask)); awaited == 0 {
			f.delete(keys.AppendByID(nil, keys.Pending, id))
			f.set(wake, []byte{keys.WakeUp})
			return
		}
		f.set(keys.AppendByID(nil, keys.Pending, id), keys.AppendNumber(nil, awaited))
		for _, p := range ask {
			c.send(f, i, &keys.Message{Kind: keys.MsgDepend, Parent: p, Child: id, Outcome: rec.OnDead})
		}
	})
}

// cancels reports whether a parent has ended in such a way that its children are canceled. It is
// asked here, since the parent may be forgotten before a message reaches it.
func (c *crosscheck) cancels(parent keys.ID, onDead uint8) (bool, error) {
	p, value, err := c.views[c.shardOf(parent)].Find(parent)
	if err != nil || value == nil {
		return false, err
	}
	return p.Range == keys.Canceled || p.Range == keys.Dead && onDead == keys.CancelOnDead, nil
}

// send adds a message of a shard to that of a parent.
func (c *crosscheck) send(f *fix, from int, m *keys.Message) {
	to := c.shardOf(m.Parent)
	c.sent[from][to]++
	f.set(keys.AppendOutbound(nil, uint32(to), c.sent[from][to]), m.Append(nil))
	f.number(keys.Sent, to, c.sent[from][to])
}

// countPins counts the pins of the tasks of a shard.
func (c *crosscheck) countPins(i int) error {
	return store.Scan(c.shards[i], keys.Pin, func(key, _ []byte) error {
		_, parent, err := keys.ParsePin(key)
		if err != nil {
			return fmt.Errorf("%w: %w", base.ErrCorrupt, err)
		}
		c.pins[parent]++
		return nil
	})
}

// comparePins compares how many pins the parents of a shard have with how many there are.
func (c *crosscheck) comparePins(i int) error {
	return store.ScanParsed(c.shards[i], keys.Pinned, keys.ParseByID, keys.ParsePinned, func(id keys.ID, v keys.PinnedValue) error {
		n := c.pins[id]
		delete(c.pins, id)
		telling, err := has(c.shards[i], keys.AppendByID(nil, keys.Telling, id))
		if err != nil {
			return err
		}
		if telling {
			n++
		}
		if n == v.Count {
			return nil
		}
		c.report(i, "task %s is kept for %d tasks, and %d need it", keys.FormatID(id), v.Count, n)
		return c.fix(i, func(f *fix) {
			v.Count = max(n, 1)
			f.set(keys.AppendByID(nil, keys.Pinned, id), v.Append(nil))
			if n == 0 {
				c.send(f, i, &keys.Message{Kind: keys.MsgUnpin, Parent: id})
			}
		})
	})
}

// pinAgain keeps those parents of a shard for their children that are kept for some time only: the
// shard of the children has lost that they have ended. Or a repair has lost the number of the pins.
func (c *crosscheck) pinAgain(i int) error {
	sizes := make(map[keys.Place]uint64) // of the buckets
	resize := func(f *fix, bucket keys.Place, by int) error {
		key := keys.AppendBucket(nil, bucket.Range, bucket.Group, bucket.At)
		if _, known := sizes[bucket]; !known {
			b, err := store.Lookup(c.shards[i], key)
			if err == nil && b != nil {
				sizes[bucket], err = keys.ParseNumber(b)
			}
			if err != nil {
				return err
			}
		}
		if sizes[bucket] += uint64(by); sizes[bucket] == 0 {
			f.delete(key)
		} else {
			f.set(key, keys.AppendNumber(nil, sizes[bucket]))
		}
		return nil
	}
	for id, n := range c.pins {
		if c.shardOf(id) != i {
			continue
		}
		from, value, err := c.views[i].Find(id)
		if err != nil {
			return err
		}
		if value == nil || from.Range != keys.Done {
			continue
		}
		delete(c.pins, id)
		c.report(i, "task %s is kept for no task, and %d need it", keys.FormatID(id), n)
		if from.At == keys.Forever {
			if err := c.fix(i, func(f *fix) {
				f.set(keys.AppendByID(nil, keys.Pinned, id), keys.PinnedValue{Count: n}.Append(nil))
			}); err != nil {
				return err
			}
			continue
		}
		to := from
		to.At = keys.Forever
		var resized error
		if err := c.fix(i, func(f *fix) {
			f.set(keys.AppendByID(nil, keys.Pinned, id), keys.PinnedValue{Count: n, Until: from.At}.Append(nil))
			f.delete(from.AppendKey(nil, id))
			f.set(to.AppendKey(nil, id), value)
			resized = errors.Join(resize(f, from, -1), resize(f, to, 1))
		}); err != nil || resized != nil {
			return errors.Join(err, resized)
		}
	}
	return nil
}

// dropPins removes the pins of parents that have not ended, as far as their shard knows, or are
// gone.
func (c *crosscheck) dropPins(i int) error {
	if len(c.pins) == 0 {
		return nil
	}
	for _, m := range c.stored[i] {
		if c.pins[m.parent] > 0 {
			c.report(i, "task %s is not kept, and a message says that it is, or need not be", keys.FormatID(m.parent))
			if err := c.fix(i, func(f *fix) { f.set(m.key, m.instead.Append(nil)) }); err != nil {
				return err
			}
		}
	}
	return store.Scan(c.shards[i], keys.Pin, func(key, _ []byte) error {
		child, parent, err := keys.ParsePin(key)
		if err != nil || c.pins[parent] == 0 {
			return err
		}
		c.report(i, "task %s needs the result of %s, which is not kept for it", keys.FormatID(child), keys.FormatID(parent))
		return c.fix(i, func(f *fix) { f.delete(bytes.Clone(key)) })
	})
}

// has reports whether a key exists.
func has(r pebble.Reader, key []byte) (bool, error) {
	_, closer, err := r.Get(key)
	if errors.Is(err, pebble.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, store.Error(err)
	}
	return true, closer.Close()
}
