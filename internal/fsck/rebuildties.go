package fsck

import (
	"bytes"
	"errors"

	"codeq/internal/keys"
	"codeq/internal/record"
)

// The ties of tasks: idempotency keys, turns of groups, parents and children, and the messages
// between shards. Where a tie is lost, the rebuilder leaves the work to others: a wakeup gives the
// turn of a group, and convert.Reconcile compares parents with their children.

// rebuildUnique copies the holders of the idempotency keys. If some entries are lost, a key without
// a holder goes to an unended task: to one with a record that says that it holds the key, or else
// to the first; a released key may look the same, and is then taken again.
func (b *rebuilder) rebuildUnique() error {
	holders := make(map[[keys.UniqueLen]byte]taskID)
	if err := scanParsed(b.old, keys.Unique, keys.ParseHashed, keys.ParseUnique, func(
		hash [keys.UniqueLen]byte, v keys.UniqueValue, key, value []byte,
	) {
		t := b.tasks[v.ID]
		lives := t != nil && !t.ended() && t.Unique == hash
		if t != nil && t.Unique != hash || v.Until == 0 && !lives {
			return
		}
		holders[hash] = v.ID
		b.set(key, value)
		if v.Until != 0 {
			b.set(keys.AppendFreed(nil, v.Until, hash), nil)
		}
	}); err != nil {
		return err
	}
	take := func(flags uint8) {
		for _, id := range b.inOrder() {
			t := b.tasks[id]
			if _, taken := holders[t.Unique]; t.ended() || t.Unique == [keys.UniqueLen]byte{} || taken || t.Flags&flags != flags {
				continue
			}
			holders[t.Unique] = id
			v := keys.UniqueValue{ID: keys.ID(id)}
			if t.UniqueFor != 0 {
				v.Until = keys.KeyUntil(keys.ID(id), 0, t.UniqueFor)
				b.set(keys.AppendFreed(nil, v.Until, t.Unique), nil)
			}
			b.set(keys.AppendHashed(nil, t.Unique), v.Append(nil))
		}
	}
	if b.old.gaps[keys.Unique] {
		take(record.HoldsKey)
		take(0)
	}
	if err := b.commit(); err != nil {
		return err
	}
	for id, t := range b.tasks {
		if t.Flags&record.HoldsKey != 0 && !t.ended() && holders[t.Unique] != id {
			if err := b.rewrite(id, t, func(rec *record.Record) {
				rec.Flags &^= record.HoldsKey
				rec.Rewritten = rec.Rewritten || t.Range == keys.Task
			}); err != nil {
				return err
			}
		}
	}
	return nil
}

// rebuildWakeups copies the wakeups.
func (b *rebuilder) rebuildWakeups() error {
	return b.old.scan(keys.Wake, func(key, value []byte) {
		queue, scope, id, err := keys.ParseGrouped(key)
		if _, ok := b.queues[queue]; err == nil && ok && len(value) == 1 {
			b.wakes[wakeKey{queue, scope, id}] = value[0]
		}
	})
}

func (b *rebuilder) writeWakeups() error {
	for k, how := range b.wakes {
		b.set(keys.AppendGrouped(nil, keys.Wake, k.queue, k.scope, k.id), []byte{how})
	}
	return nil
}

// rebuildTurns stores the holder of each group's turn: the task that had it, or else one that is
// ready or leased, or a dead letter that holds it, or a task between two attempts. If there is
// none, the first waiting task gets it.
func (b *rebuilder) rebuildTurns() error {
	held := make(map[uint64]taskID)
	if err := scanParsed(b.old, keys.Group, keys.ParseScope, keys.ParseGroup, func(scope uint64, v keys.GroupValue, _, _ []byte) {
		if t := b.tasks[v.Holder]; t != nil && (!t.ended() || t.HoldsTurn) && t.Head.Group == scope {
			held[scope] = v.Holder
		}
	}); err != nil {
		return err
	}
	waiting := make(map[uint64]uint32) // queue, by scope
	between := make(map[uint64]taskID)
	var holding []taskID // dead letters
	for _, id := range b.inOrder() {
		t := b.tasks[id]
		scope := t.Head.Group
		if scope == 0 || t.ended() && !t.HoldsTurn {
			continue
		}
		_, ok := held[scope]
		switch {
		case t.HoldsTurn:
			holding = append(holding, id)
			if !ok {
				held[scope] = id
			}
		case t.Range == keys.Blocked && t.At == scope:
			waiting[scope] = t.queue
		case t.Range == keys.Task && (!ok || b.tasks[held[scope]].Range != keys.Task):
			held[scope] = id
		case t.Range == keys.Scheduled && t.Leases > 0, t.Range == keys.Blocked && t.Suspect:
			between[scope] = id
		}
	}
	for scope, id := range between {
		if _, ok := held[scope]; !ok {
			held[scope] = id
		}
	}
	for scope, queue := range waiting {
		if _, ok := held[scope]; !ok {
			held[scope] = taskID{}
			b.wakes[wakeKey{queue, scope, taskID{}}] = keys.WakeUp
		}
	}
	for scope, id := range held {
		_, waits := waiting[scope]
		b.set(keys.AppendScope(nil, scope), keys.GroupValue{Holder: keys.ID(id), Waiting: waits}.Append(nil))
	}
	for _, id := range holding {
		t := b.tasks[id]
		if held[t.Head.Group] == id {
			continue
		}
		if err := b.rewrite(id, t, func(rec *record.Record) { rec.HoldsTurn = false }); err != nil {
			return err
		}
	}
	return nil
}

// copyMessages copies the messages between the shards.
func (b *rebuilder) copyMessages() error {
	settings := make(map[string]keys.SettingsValue) // the last that the shard has sent
	var taken uint64                                // last message from itself
	err := errors.Join(
		scanParsed(b.old, keys.Inbound, keys.ParseNumbered, keys.ParseNumber, func(from uint32, last uint64, key, value []byte) {
			if int(from) < b.shards {
				b.set(key, value)
			}
			if int(from) == b.index {
				taken = last
			}
		}),
		scanParsed(b.old, keys.Sent, keys.ParseNumbered, keys.ParseNumber, func(to uint32, last uint64, _, _ []byte) {
			if int(to) < b.shards {
				b.sent[to] = last
			}
		}),
		b.old.scan(keys.Outbound, func(key, value []byte) {
			to, seq, err := keys.ParseOutbound(key)
			m, valueErr := keys.ParseMessage(value)
			if err != nil || valueErr != nil || int(to) >= b.shards {
				return
			}
			b.set(key, value)
			b.sent[to] = max(b.sent[to], seq)
			if m.Kind == keys.MsgLeft && (int(to) != b.index || seq > taken) {
				b.leaving[m.Child] = true
			}
			if m.Kind == keys.MsgSettings { // which the shard had when it sent them
				v, err := keys.ParseSettings(m.Settings)
				if _, bad := b.rules.Settings(m.Settings); err == nil && bad == nil && v.Version >= settings[m.Queue].Version {
					settings[m.Queue] = keys.SettingsValue{Version: v.Version, JSON: bytes.Clone(v.JSON)}
				}
			}
		}))
	b.addSent(settings)
	return err
}

// addSent adds settings that the shard has sent, and so has had, unless it has removed them since.
func (b *rebuilder) addSent(sent map[string]keys.SettingsValue) {
	for queue, v := range sent {
		if !v.IsNone() && v.Version > b.latest[queue] {
			b.latest[queue] = v.Version
			b.set(append([]byte{keys.Settings}, queue...), v.Append(nil))
		}
	}
}

// rebuildParents copies the ties between tasks and the parents that they wait for. A waiting task
// without a known number of parents counts all of them.
func (b *rebuilder) rebuildParents() error {
	waits := make(map[taskID]uint64) // for how many parents
	err := errors.Join(
		b.old.scan(keys.Telling, func(key, value []byte) {
			parent, end, err := keys.ParseTelling(key, value)
			if t := b.tasks[parent]; err == nil && (t == nil || t.Range == end) {
				b.told[parent] = true
				b.set(key, value)
			}
		}),
		scanParsed(b.old, keys.Pending, keys.ParseByID, keys.ParseNumber, func(id keys.ID, n uint64, _, _ []byte) { waits[id] = n }),
		b.old.scan(keys.Dependent, func(key, value []byte) {
			parent, _, err := keys.ParseDependent(key)
			if err == nil && len(value) == 1 && value[0] <= keys.AtAnyEnd && (b.awaited(parent) || b.told[parent]) {
				b.set(key, value)
			}
		}),
	)
	for id, t := range b.tasks {
		if !t.waitsForParents() {
			continue
		}
		n := waits[id]
		if _, goesOn := b.wakes[wakeKey{t.queue, 0, id}]; !goesOn && (n == 0 || n > uint64(t.parents)) {
			n = uint64(t.parents)
		}
		if n > 0 {
			b.set(keys.AppendByID(nil, keys.Pending, id), keys.AppendNumber(nil, n))
		}
	}
	return err
}

// copyPins copies the pins that keep parents for their children, unless the child is lost. A parent
// with a lost number of pins gets one, which Reconcile corrects. If its record does not say how
// long it is kept, only pins tell that it is not kept for ever, and Reconcile adds the number.
func (b *rebuilder) copyPins() error {
	err := errors.Join(
		scanParsed(b.old, keys.Pinned, keys.ParseByID, keys.ParsePinned, func(id keys.ID, v keys.PinnedValue, key, value []byte) {
			if t := b.tasks[id]; t != nil && t.Range == keys.Done && t.At == keys.Forever && v.Count > 0 && v.Until != keys.Forever {
				t.pinned = true
				b.set(key, value)
			}
		}),
		b.old.scan(keys.Pin, func(key, value []byte) {
			child, _, err := keys.ParsePin(key)
			t := b.tasks[child]
			if err == nil && len(value) == 0 && (b.leaving[child] || t != nil && t.Child && (!t.ended() || t.Range == keys.Dead)) {
				b.set(key, nil)
			}
		}),
	)
	for id, t := range b.tasks {
		if t.isKept() && !t.pinned {
			b.set(keys.AppendByID(nil, keys.Pinned, id), keys.PinnedValue{Count: 1}.Append(nil))
		}
	}
	return err
}

// writeSent stores the numbers of the last messages.
func (b *rebuilder) writeSent() error {
	for to, n := range b.sent {
		if n > 0 {
			b.set(keys.AppendNumbered(nil, keys.Sent, to), keys.AppendNumber(nil, n))
		}
	}
	return nil
}

// awaited reports whether a task of this shard may have children that wait for it.
func (b *rebuilder) awaited(parent keys.ID) bool {
	t := b.tasks[parent]
	return t != nil && t.Parent && (!t.ended() || t.Range == keys.Dead && t.At == keys.Forever)
}
