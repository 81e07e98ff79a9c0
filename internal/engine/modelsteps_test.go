package engine

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/store"
)

// stepCall is StoreStep, or Suspend.
type stepCall struct {
	receipt  Receipt
	suspends bool
	again    bool  // the last step is stored again
	wait     int64 // ms
	number   uint32
	step     record.Step
	err      error
}

func (m *model) drawStep() call {
	m.serial++
	c := &stepCall{
		receipt: m.drawReceipt(), suspends: m.oneIn(3, "suspends"), again: m.oneIn(6, "again"), wait: oneOf[int64](m, "wait", 0, 1, 2000),
		step: record.Step{Kind: record.StepResult, Name: fmt.Sprint("step ", m.serial)},
	}
	if c.suspends && m.oneIn(2, "for a signal") {
		c.step.Kind, c.step.Name = record.StepNoSignal, m.drawSignalName()
	}
	return c
}

func (m *model) drawSignalName() string { return oneOf(m, "signal", "s", "t", "u") }

func (c *stepCall) do(m *model) {
	if t := m.tasks[c.receipt.ID]; t != nil {
		c.number = uint32(len(t.steps))
	}
	if c.again = c.again && c.number > 0 && !c.suspends; c.again {
		c.number--
	}
	_, c.err = m.decide(keys.ShardOf(c.receipt.ID, m.config.Shards), func(s *drivenShard) (Verdict, error) {
		if c.suspends {
			return s.Suspend(c.receipt, c.wait, c.number, &c.step)
		}
		return Decided, s.Leases.StoreStep(c.receipt, c.number, &c.step, nil)
	})
}

func (c *stepCall) apply(m *model) {
	t := m.held(c.receipt)
	if t == nil {
		if m.lost(c.receipt, c.err); c.suspends {
			m.returned(c.receipt)
		}
		return
	}
	m.noError(c.err)
	if int(c.number) == len(t.steps) { // else it is stored already
		t.steps = append(t.steps, stepText(&c.step))
	}
	if c.suspends {
		t.rec.Attempts--
		t.folded = true
		if c.step.Kind == record.StepNoSignal {
			if t.awaits = t.receipt; t.take(c.step.Name) {
				c.wait = 0
			}
		}
		m.wait(t, uint64(c.wait), false)
		m.react()
	}
}

// take makes the last step of a task that waits for a signal the one with its value, if the signal
// has come.
func (t *modelTask) take(name string) bool {
	i := slices.IndexFunc(t.signals, func(s record.Signal) bool { return s.Name == name && !s.Taken })
	if i < 0 {
		return false
	}
	t.steps[len(t.steps)-1] = stepText(&record.Step{Kind: record.StepSignal, Name: name, Result: t.signals[i].Value})
	t.signals[i].Taken, t.signals[i].Value = true, nil
	t.awaits = Receipt{}
	return true
}

// step returns the number of the first step of a name, or less than 0.
func (t *modelTask) step(name string) int {
	return slices.IndexFunc(t.steps, func(text string) bool { return nameOfStep(text) == name })
}

// got reports whether a step has the value of a signal.
func (t *modelTask) got(signal string) bool {
	begin := stepText(&record.Step{Kind: record.StepSignal, Name: signal})
	return slices.ContainsFunc(t.steps, func(text string) bool { return strings.HasPrefix(text, begin) })
}

// nameOfStep returns the name in the result of stepText.
func nameOfStep(text string) string {
	fields := strings.Fields(text)
	if fields[0] == "step" {
		return fields[0] + " " + fields[1]
	}
	return fields[0]
}

func stepText(s *record.Step) string { return fmt.Sprintf("%s %d %s", s.Name, s.Kind, s.Result) }

// signalCall is Alter with a signal.
type signalCall struct {
	id     keys.ID
	signal record.Signal
	err    error
}

func (m *model) drawSignal() call {
	m.serial++
	value := fmt.Sprint("value ", m.serial)
	states := [][]TaskState{{Scheduled}, {Leased}, {Ready, Blocked}, {Dead, Done, Canceled}}
	return &signalCall{m.drawIDIn(oneOf(m, "state", states...)...), record.Signal{Name: m.drawSignalName(), Size: uint32(len(value)), Value: []byte(value)}, nil}
}

func (c *signalCall) do(m *model) {
	_, c.err = m.decide(keys.ShardOf(c.id, m.config.Shards), func(s *drivenShard) (Verdict, error) { return s.Alter(c.id, 0, AlterTo{Signal: &c.signal}) })
}

func (c *signalCall) apply(m *model) {
	t := m.tasks[c.id]
	switch {
	case t == nil || t.state >= Dead:
		if !errors.Is(c.err, base.ErrNotFound) {
			m.rt.Fatalf("signal for %+v: %v", t, c.err)
		}
		return
	case record.Signals(t.signals).Find(c.signal.Name) != nil:
		if d := new(Duplicate); !errors.As(c.err, &d) || d.Signal != c.signal.Name || d.ID != c.id {
			m.rt.Fatalf("signal for %+v: %v", t, c.err)
		}
		return
	}
	m.noError(c.err)
	t.signals = append(t.signals, c.signal)
	if n := len(t.steps); m.isAwaiting(t) && t.steps[n-1] == stepText(&record.Step{Kind: record.StepNoSignal, Name: c.signal.Name}) {
		if t.take(c.signal.Name); t.state == Scheduled {
			m.enter(t, m.since(t.shard))
			m.react()
		}
	}
}

// cursorCall is StoreStep with cursors.
type cursorCall struct {
	receipt Receipt
	value   string
	err     error
}

func (m *model) drawCursor() call {
	m.serial++
	return &cursorCall{m.drawReceipt(), fmt.Sprint(m.serial), nil}
}

func (c *cursorCall) do(m *model) {
	_, c.err = m.decide(keys.ShardOf(c.receipt.ID, m.config.Shards), func(s *drivenShard) (Verdict, error) {
		return Decided, s.Leases.StoreStep(c.receipt, 0, nil, record.Cursors{"c": []byte(c.value)}.Append(nil))
	})
}

func (c *cursorCall) apply(m *model) {
	t := m.held(c.receipt)
	if t == nil {
		m.lost(c.receipt, c.err)
		return
	}
	m.noError(c.err)
	t.cursor = c.value
}

// isAwaiting reports whether a task was suspended until a signal, and no run has begun since.
func (m *model) isAwaiting(t *modelTask) bool {
	return t.state < Dead && t.state != Leased && t.awaits != Receipt{} && t.awaits == t.receipt
}

// compareSteps compares the steps of a task.
func (m *model) compareSteps(got *store.Task, t *modelTask) {
	steps, rows := got.Record.Kept, 0
	if !keys.Ended(got.Range) {
		var err error
		steps, err = store.StepsOf(m.shards[t.shard].Store.DB(), got.ID)
		m.noError(err)
		rows = len(steps)
	}
	var names []string
	for i := range steps {
		names = append(names, stepText(&steps[i]))
	}
	m.compareSignals(got, t)
	if !slices.Equal(names, t.steps) || int(got.Record.Steps) > rows || got.Lease == nil && int(got.Record.Steps) != rows {
		m.rt.Fatalf("steps of %s are %q, the record says %d, expected %q", keys.FormatID(t.id), names, got.Record.Steps, t.steps)
	}
}

// compareSignals compares the signals and the cursor of a task. A shard may lose that a task has
// none.
func (m *model) compareSignals(got *store.Task, t *modelTask) {
	signals, err := store.SignalsOf(m.shards[t.shard].Store.DB(), got.ID)
	m.noError(err)
	for i := range signals {
		signals[i].At = 0
	}
	want, beside, cursors := t.signals, got.Record.Beside, got.Record.Cursors
	if keys.Ended(got.Range) {
		want = nil
	} else {
		cursors, err = store.CursorsOf(m.shards[t.shard].Store.DB(), got.ID)
		m.noError(err)
	}
	same := slices.EqualFunc(signals, want, func(a, b record.Signal) bool {
		return a.Name == b.Name && a.Taken == b.Taken && a.Size == b.Size && string(a.Value) == string(b.Value)
	})
	same = same && string(cursors["c"]) == t.cursor
	if same && keys.Ended(got.Range) {
		same = beside == 0
	} else if same && got.Lease == nil {
		same = (len(want) == 0 || beside&record.HasSignals != 0) && (t.cursor == "" || beside&record.HasCursors != 0) &&
			(beside&record.Awaits != 0) == m.isAwaiting(t)
	}
	if !same {
		m.rt.Fatalf("signals of %s are %+v, cursors %s, the record says %x, expected %+v of %+v", keys.FormatID(t.id), signals, cursors, beside, want, t)
	}
}
