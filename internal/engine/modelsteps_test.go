package engine

import (
	"fmt"
	"slices"

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
	return &stepCall{
		receipt: m.drawReceipt(), suspends: m.oneIn(3, "suspends"), again: m.oneIn(6, "again"), wait: oneOf[int64](m, "wait", 0, 1, 2000),
		step: record.Step{Kind: record.StepResult, Name: fmt.Sprint("step ", m.serial)},
	}
}

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
		return Decided, s.Leases.StoreStep(c.receipt, c.number, &c.step)
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
		t.steps = append(t.steps, c.step.Name)
	}
	if c.suspends {
		t.rec.Attempts--
		t.suspended = true
		m.wait(t, uint64(c.wait))
		m.react()
	}
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
		names = append(names, steps[i].Name)
	}
	if !slices.Equal(names, t.steps) || int(got.Record.Steps) > rows || got.Lease == nil && int(got.Record.Steps) != rows {
		m.rt.Fatalf("steps of %s are %q, the record says %d, expected %q", keys.FormatID(t.id), names, got.Record.Steps, t.steps)
	}
}
