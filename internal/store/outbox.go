package store

import (
	"fmt"
	"slices"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/keys"
)

// Outbox makes another shard do something exactly once. The message is stored in the commit of its
// cause, numbered by receiver. The receiver stores the number of the last message of each sender in
// the commit of the message's effects, and ignores earlier numbers. Messages of one sender and
// receiver are taken in order, some hundred at a time, the next ones when these are taken. Memory
// holds only those being sent.
//
// A message that is taken is deleted when the commit of its receiver is durable: the logs of two
// shards have no order, and a power loss below DurabilityDisk might keep the deletion and lose the
// effects of the message. Until then the message is kept, and sent again after Open.
//
// A shard sends messages to itself in the same way. They are deleted once they are taken, as both
// commits are in one log.
//
// The number of the last message to each receiver has its own entry, since the message will be
// deleted. The numbers of the messages that wait for a receiver have a gap if a power loss took the
// last of them from the sender, and the receiver had taken these.
type Outbox struct {
	to    []receiver
	ahead bool // some number is larger than the stored one
	due   bool // there may be something to send
	over  bool // there may be something to delete
}

// receiver has the numbers of the messages to a shard.
type receiver struct {
	next    uint64 // the next message
	stored  uint64 // the last message, as stored
	first   uint64 // no message before it is stored
	taken   uint64 // the last message that the receiver has taken, as far as is known
	durable uint64 // messages up to it may be deleted once they are taken
	waiting uint64 // how many are not taken
	sending bool   // messages are being sent
}

// end returns the number before which no message is needed any more.
func (r *receiver) end() uint64 { return min(r.taken, r.durable) + 1 }

// Send stores a message to a shard.
func (o *Outbox) Send(w *Writes, to int, m *keys.Message) {
	r := &o.to[to]
	w.Set(keys.AppendOutbound(nil, uint32(to), r.next), m.Append(nil))
	r.next++
	r.waiting++
	o.ahead, o.due = true, true
}

// Load finds the messages that were not deleted before the queue was closed. All of them are sent:
// their receivers know which they have taken.
func (o *Outbox) Load(disk pebble.Reader, shards int) error {
	*o = Outbox{to: make([]receiver, shards)}
	stored, err := LoadNumbers(disk, keys.Sent, shards)
	if err != nil {
		return err
	}
	last := slices.Clone(stored)
	if err := Scan(disk, keys.Outbound, func(key, _ []byte) error {
		to, seq, err := keys.ParseOutbound(key)
		if err != nil || int(to) >= shards {
			return fmt.Errorf("%w: malformed message key %x", base.ErrCorrupt, key)
		}
		r := &o.to[to]
		if r.waiting == 0 {
			r.first = seq
		}
		last[to] = max(last[to], seq)
		r.waiting++
		o.due = true
		return nil
	}); err != nil {
		return err
	}
	for to := range o.to {
		r := &o.to[to]
		r.stored, r.next = stored[to], last[to]+1
		if r.waiting == 0 {
			r.first = r.next
		}
		r.taken = r.first - 1
		o.ahead = o.ahead || r.next != r.stored+1
	}
	return nil
}

// LoadNumbers reads the numbers of messages in the range Inbound or Sent, by shard.
func LoadNumbers(disk pebble.Reader, prefix byte, shards int) ([]uint64, error) {
	numbers := make([]uint64, shards)
	err := Scan(disk, prefix, func(key, value []byte) error {
		n, err := keys.ParseNumbered(key)
		if err == nil && int(n) < shards {
			numbers[n], err = keys.ParseNumber(value)
		}
		if err != nil || int(n) >= shards {
			return fmt.Errorf("%w: last message number %x has value %x", base.ErrCorrupt, key, value)
		}
		return nil
	})
	return numbers, err
}

// Seal stores the numbers of the last messages.
func (o *Outbox) Seal(w *Writes) {
	if !o.ahead {
		return
	}
	o.ahead = false
	for to := range o.to {
		if r := &o.to[to]; r.next-1 != r.stored {
			r.stored = r.next - 1
			w.Set(keys.AppendNumbered(nil, keys.Sent, uint32(to)), keys.AppendNumber(nil, r.stored))
		}
	}
}

// IsAhead reports whether some numbers of messages are not stored yet.
func (o *Outbox) IsAhead() bool { return o.ahead }

// IsBusy reports whether some messages are not taken.
func (o *Outbox) IsBusy() bool {
	return slices.ContainsFunc(o.to, func(r receiver) bool { return r.waiting > 0 })
}

// SendIsDue reports whether there may be something to send.
func (o *Outbox) SendIsDue() bool { return o.due }

// ReadOut reads stored messages, for the owner to send: at least one for each receiver that has
// taken the others, at most so many, and none after spent returns true. send gets them with the
// number of the first one.
// REQUIRES: the group has no messages, so that disk has them all.
func (o *Outbox) ReadOut(in *Reads, most int, spent func() bool, send func(to int, first uint64, messages []keys.Message)) error {
	o.due = false
	for to := range o.to {
		r := &o.to[to]
		if r.sending || r.waiting == 0 {
			continue
		}
		first, messages := uint64(0), []keys.Message(nil)
		lower := keys.AppendOutbound(nil, uint32(to), r.taken+1)
		upper := keys.AppendNumbered(nil, keys.Outbound, uint32(to)+1)
		if err := in.Walk(lower, upper, func(it *pebble.Iterator, n int) (bool, error) {
			_, seq, err := keys.ParseOutbound(it.Key())
			if err != nil {
				return false, err
			}
			if n == 0 {
				first = seq
			} else if seq != first+uint64(n) {
				return false, nil
			}
			v, err := it.ValueAndErr()
			if err != nil {
				return false, err
			}
			m, err := keys.ParseMessage(append([]byte(nil), v...))
			if err != nil {
				return false, err
			}
			messages = append(messages, m)
			return len(messages) < most && !spent(), nil
		}); err != nil {
			return err
		}
		if len(messages) == 0 { // they are in this group
			o.due = true
			continue
		}
		r.sending = true
		send(to, first, messages)
	}
	return nil
}

// Untaken returns the number of the first message to a shard that may not have been taken, and of
// the next one that will be sent: if they are equal, all have been.
func (o *Outbox) Untaken(to int) (first, next uint64) { return o.to[to].taken + 1, o.to[to].next }

// Confirmed notes that the receiver has taken the first n messages of those being sent; the others
// are sent again.
func (o *Outbox) Confirmed(to int, first uint64, n int) {
	r := &o.to[to]
	r.taken = max(r.taken, first+uint64(n)-1)
	if r.waiting -= uint64(n); r.waiting == 0 { // there may be a gap before the next one
		r.taken = r.next - 1
	}
	r.sending = false
	o.due = o.due || r.waiting > 0
	o.over = o.over || r.first < r.end()
}

// NoteDurable notes that no power loss undoes the effects of the messages up to a number, if their
// receiver has taken them.
func (o *Outbox) NoteDurable(to int, last uint64) { o.to[to].durable = max(o.to[to].durable, last) }

// ForgetIsDue reports whether there may be something to delete.
func (o *Outbox) ForgetIsDue() bool { return o.over }

// ForgetTaken deletes the messages that are taken for good, until spent returns true.
func (o *Outbox) ForgetTaken(w *Writes, spent func() bool) {
	o.over = false
	for to := range o.to {
		r := &o.to[to]
		for end := r.end(); r.first < end; r.first++ {
			if spent() {
				o.over = true
				return
			}
			w.Delete(keys.AppendOutbound(nil, uint32(to), r.first))
		}
	}
}

// OutboxUsage has numbers of messages by receiver, for tests.
type OutboxUsage struct{ Next, Stored, Waiting []uint64 }

// Usage returns the present numbers.
func (o *Outbox) Usage() (u OutboxUsage) {
	for i := range o.to {
		r := &o.to[i]
		u.Next, u.Stored = append(u.Next, r.next), append(u.Stored, r.stored)
		u.Waiting = append(u.Waiting, r.waiting)
	}
	return u
}

// LoseNumbers resets the stored numbers of messages in memory, as if disk had none, for tests.
func (o *Outbox) LoseNumbers() {
	for to := range o.to {
		o.to[to].stored = 0
	}
	o.ahead = true
}

// Check compares the outbox with disk, for tests, and returns the differences: stored messages are
// numbered between first and next, and as many wait as are stored and not taken.
func (o *Outbox) Check(disk pebble.Reader) (errs []error) {
	report := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	waiting := make([]uint64, len(o.to))
	if err := Scan(disk, keys.Outbound, func(key, _ []byte) error {
		to, seq, err := keys.ParseOutbound(key)
		if err != nil {
			return err
		}
		r := &o.to[to]
		if seq < r.first || seq >= r.next {
			report("message %d for shard %d is not one of %d to %d", seq, to, r.first, r.next)
		}
		if seq > r.taken {
			waiting[to]++
		}
		return nil
	}); err != nil {
		report("messages: %w", err)
	}
	last, err := LoadNumbers(disk, keys.Sent, len(o.to))
	if err != nil {
		report("numbers of messages: %w", err)
	}
	for to := range o.to {
		r := &o.to[to]
		if r.waiting != waiting[to] {
			report("%d messages to shard %d wait, on disk %d", r.waiting, to, waiting[to])
		}
		if last[to] != r.next-1 || r.stored != last[to] {
			report("the next message to shard %d is %d, the last one is %d, on disk %d", to, r.next, r.stored, last[to])
		}
	}
	return errs
}
