package fsck

import (
	"bytes"
	"errors"

	"codeq/internal/keys"
	"codeq/internal/record"
)

// The ties of tasks: idempotency keys, turns of groups, parents and children, and the messages
// between shards. Where a tie is lost, the rebuilder leaves the work to the rules of the shard: a
// wakeup gives the turn of a group, a message asks a parent again, or unpins it.

// rebuildUnique copies the holders of the idempotency keys. If some entries are lost, a key without
// a holder goes to an unended task: to one with a record that says that it holds the key, or else
// to the first; a released key may look the same, and is then taken again.
func (b *rebuilder) rebuildUnique() error {
	holders := make(map[[keys.UniqueLen]byte]taskID)
	if err := b.old.scan(keys.Unique, func(key, value []byte) {
		hash, err := keys.ParseHashed(key)
		v, valueErr := keys.ParseUnique(value)
		t := b.tasks[v.ID]
		lives := t != nil && !t.ended() && t.Unique == hash
		if err != nil || valueErr != nil || t != nil && t.Unique != hash || v.Until == 0 && !lives {
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
	if err := b.old.scan(keys.Group, func(key, value []byte) {
		scope, err := keys.ParseScope(key)
		v, valueErr := keys.ParseGroup(value)
		if t := b.tasks[v.Holder]; err == nil && valueErr == nil && t != nil && (!t.ended() || t.HoldsTurn) && t.Head.Group == scope {
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
	numbers := func(prefix byte, visit func(n uint32, key, value []byte)) error {
		return b.old.scan(prefix, func(key, value []byte) {
			n, err := keys.ParseNumbered(key)
			if _, valueErr := keys.ParseNumber(value); err == nil && valueErr == nil && int(n) < b.shards {
				visit(n, key, value)
			}
		})
	}
	settings := make(map[string]keys.SettingsValue) // the last that the shard has sent
	err := errors.Join(
		numbers(keys.Inbound, func(_ uint32, key, value []byte) { b.set(key, value) }),
		numbers(keys.Sent, func(n uint32, _, value []byte) { b.sent[n], _ = keys.ParseNumber(value) }),
		b.old.scan(keys.Outbound, func(key, value []byte) {
			to, seq, err := keys.ParseOutbound(key)
			m, valueErr := keys.ParseMessage(value)
			if err != nil || valueErr != nil || int(to) >= b.shards {
				return
			}
			b.set(key, value)
			b.sent[to] = max(b.sent[to], seq)
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
// without a known number of parents asks all of them again; so do all tasks if a parent, or one of
// its entries, may be lost: a parent that does not exist has ended.
func (b *rebuilder) rebuildParents() error {
	lost := b.old.gaps[keys.Dependent] || b.old.gaps[keys.Telling]
	for _, prefix := range recordRanges {
		lost = lost || b.old.gaps[prefix]
	}
	if err := b.old.scan(keys.Telling, func(key, value []byte) {
		parent, end, err := keys.ParseTelling(key, value)
		if t := b.tasks[parent]; err == nil && (t == nil || t.Range == end) {
			b.told[parent] = true
			b.set(key, value)
		}
	}); err != nil {
		return err
	}
	waits := make(map[taskID]uint64) // for how many parents
	if err := b.old.scan(keys.Pending, func(key, value []byte) {
		id, err := keys.ParseByID(key)
		n, valueErr := keys.ParseNumber(value)
		if t := b.tasks[id]; err == nil && valueErr == nil && n > 0 && t != nil && t.waitsForParents() && !lost {
			waits[id] = n
			b.set(key, value)
		}
	}); err != nil {
		return err
	}
	type bond struct{ parent, child keys.ID }
	known := make(map[bond]bool)
	asks := func(id taskID) bool { // again
		t := b.tasks[id]
		_, wakeup := b.wakes[wakeKey{b.queueOf(t), 0, id}]
		return t != nil && t.waitsForParents() && waits[id] == 0 && !wakeup
	}
	if err := errors.Join(
		b.old.scan(keys.Dependent, func(key, value []byte) {
			parent, child, err := keys.ParseDependent(key)
			if err == nil && len(value) == 1 && value[0] <= keys.MaxOnDead && (b.awaited(parent) || b.told[parent]) && !asks(child) {
				known[bond{parent, child}] = true
				b.set(key, value)
			}
		}),
		b.old.scan(keys.Outbound, func(_, value []byte) {
			if m, err := keys.ParseMessage(value); err == nil && (m.Kind == keys.MsgDepend || m.Kind == keys.MsgEnded) {
				known[bond{m.Parent, m.Child}] = true
			}
		}),
	); err != nil {
		return err
	}
	for _, id := range b.inOrder() {
		t := b.tasks[id]
		if !t.waitsForParents() {
			continue
		}
		again := asks(id)
		if again {
			b.asking[id] = true
			b.set(keys.AppendByID(nil, keys.Pending, id), keys.AppendNumber(nil, uint64(len(t.parents))))
		}
		unknown := waits[id] // parents that do not know it; one that was redriven may have ended for it
		for _, parent := range t.parents {
			if unknown > 0 && (known[bond{parent, keys.ID(id)}] || taskID(parent).shard(b.shards) != b.index) {
				unknown--
			}
		}
		for _, parent := range t.parents {
			switch {
			case again:
				b.send(parent, &keys.Message{Kind: keys.MsgDepend, Parent: parent, Child: keys.ID(id), Outcome: t.onDead})
			case unknown > 0 && b.awaited(parent) && !known[bond{parent, keys.ID(id)}] && !b.tasks[parent].ended():
				unknown--
				b.set(keys.AppendDependent(nil, parent, keys.ID(id)), []byte{t.onDead})
			}
		}
	}
	return nil
}

// send adds a message to the shard of a task.
func (b *rebuilder) send(about keys.ID, m *keys.Message) {
	to := uint32(taskID(about).shard(b.shards))
	b.sent[to]++
	b.set(keys.AppendOutbound(nil, to, b.sent[to]), m.Append(nil))
}

// rebuildPins copies the pins that keep parents for their children. A task that is lost, or asks
// its parents again, releases them. A parent without a known number of pins is kept for ever.
func (b *rebuilder) rebuildPins() error {
	counts, found := make(map[taskID]keys.PinnedValue), make(map[taskID]uint64)
	leaving := make(map[taskID]bool)
	var taken uint64
	type pin struct{ child, parent taskID }
	var dropped []pin
	if err := errors.Join(
		b.old.scan(keys.Pinned, func(key, value []byte) {
			id, err := keys.ParseByID(key)
			v, valueErr := keys.ParsePinned(value)
			if t := b.tasks[id]; err == nil && valueErr == nil && t != nil && t.state == done && t.At == keys.Forever {
				counts[id] = v
			}
		}),
		b.old.scan(keys.Inbound, func(key, value []byte) {
			if from, err := keys.ParseNumbered(key); err == nil && int(from) == b.index {
				taken, _ = keys.ParseNumber(value)
			}
		}),
		b.old.scan(keys.Outbound, func(key, value []byte) {
			to, seq, err := keys.ParseOutbound(key)
			m, valueErr := keys.ParseMessage(value)
			if err != nil || valueErr != nil || int(to) == b.index && seq <= taken {
				return
			}
			switch m.Kind {
			case keys.MsgEnded:
				if m.Outcome == keys.ParentPinned {
					found[m.Parent]++
				}
			case keys.MsgUnpin:
				found[m.Parent]++
			case keys.MsgLeft:
				leaving[m.Child] = true
			}
		}),
		b.old.scan(keys.Pin, func(key, value []byte) {
			child, parent, err := keys.ParsePin(key)
			if err != nil || len(value) != 0 {
				return
			}
			if _, ok := counts[parent]; !ok && taskID(parent).shard(b.shards) == b.index {
				return
			}
			found[parent]++
			t := b.tasks[child]
			if leaving[child] || t != nil && t.Child && (!t.ended() || t.state == dead) && !b.asking[child] {
				b.set(key, nil)
				return
			}
			dropped = append(dropped, pin{child, parent})
		}),
	); err != nil {
		return err
	}
	for _, p := range dropped {
		b.send(keys.ID(p.parent), &keys.Message{Kind: keys.MsgUnpin, Parent: keys.ID(p.parent)})
	}
	for id, v := range counts {
		if b.shards == 1 { // else other shards pin it
			if v.Count = found[id]; b.told[id] {
				v.Count++
			}
			if v.Count == 0 {
				v.Count = 1
				b.send(keys.ID(id), &keys.Message{Kind: keys.MsgUnpin, Parent: keys.ID(id)})
			}
		}
		b.set(keys.AppendByID(nil, keys.Pinned, keys.ID(id)), v.Append(nil))
	}
	return nil
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

func (b *rebuilder) queueOf(t *rebuiltTask) uint32 {
	if t == nil {
		return 0
	}
	return t.queue
}

// awaited reports whether a task of this shard may have children that wait for it.
func (b *rebuilder) awaited(parent keys.ID) bool {
	t := b.tasks[parent]
	return t != nil && t.Parent && (!t.ended() || t.state == dead && t.At == keys.Forever)
}
