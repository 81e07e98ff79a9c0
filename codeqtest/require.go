package codeqtest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"codeq"
)

// Task is a produced task.
type Task[T any] struct {
	*codeq.TaskInfo
	// Args is the decoded payload.
	Args T
}

// Produced returns the tasks of a queue in the order of their production, by Produce, by
// ProduceBatch or as follow-ups. It returns tasks in every state. Completed tasks are kept forever
// by default; Task.Retention and Options.Retention change that. Without a bubble, it may miss a
// task that changes its state at the same time, for example by a Run of the test.
//
// Payloads are decoded as in codeq.Handle. An error of decoding ends the test.
func Produced[T any](t testing.TB, q *Queue, queue string) []*Task[T] {
	t.Helper()
	var tasks []*Task[T]
	for _, info := range q.list(t, queue, states...) {
		args, err := decode[T](info.Payload)
		if err != nil {
			t.Fatalf("codeqtest: task %s of queue %q: payload into %T: %v\n%s",
				info.ID, queue, args, err, q.describe(queue, states...))
		}
		tasks = append(tasks, &Task[T]{info, args})
	}
	return tasks
}

// RequireProduced ends the test unless exactly one of the tasks that [Produced] returns has a
// payload that match accepts, and returns that task. A payload that cannot be decoded is not
// accepted; a nil match accepts every task.
func RequireProduced[T any](t testing.TB, q *Queue, queue string, match func(args T) bool) *Task[T] {
	t.Helper()
	return requireOne(t, q, "produced", queue, match, states)
}

// RequireDead is RequireProduced for tasks that are dead letters now.
func RequireDead[T any](t testing.TB, q *Queue, queue string, match func(args T) bool) *Task[T] {
	t.Helper()
	return requireOne(t, q, "dead", queue, match, []codeq.State{codeq.Dead})
}

// RequireNotProduced ends the test if one or more of the tasks that [Produced] returns have a
// payload that match accepts. A payload that cannot be decoded is not accepted; a nil match accepts
// every task.
func RequireNotProduced[T any](t testing.TB, q *Queue, queue string, match func(args T) bool) {
	t.Helper()
	if found := matching(t, q, queue, match, states); len(found) > 0 {
		t.Fatalf("codeqtest: %d tasks of queue %q match, want none\n%s",
			len(found), queue, q.describe(queue, states...))
	}
}

// RequireAllDone ends the test unless all tasks of the named queues, or of all queues if none is
// named, are completed: none is ready, scheduled, blocked, leased or dead.
func RequireAllDone(t testing.TB, q *Queue, queues ...string) {
	t.Helper()
	open := []codeq.State{codeq.Ready, codeq.Scheduled, codeq.Blocked, codeq.Leased, codeq.Dead}
	if len(queues) == 0 {
		queues = []string{""}
	}
	var found strings.Builder
	for _, queue := range queues {
		if len(q.list(t, queue, open...)) > 0 {
			found.WriteString(q.describe(queue, open...))
		}
	}
	if found.Len() > 0 {
		t.Fatalf("codeqtest: not all tasks are done\n%s", found.String())
	}
}

func requireOne[T any](t testing.TB, q *Queue, what, queue string, match func(args T) bool, in []codeq.State) *Task[T] {
	t.Helper()
	found := matching(t, q, queue, match, in)
	if len(found) != 1 {
		t.Fatalf("codeqtest: %d %s tasks of queue %q match, want one\n%s",
			len(found), what, queue, q.describe(queue, states...))
		return nil
	}
	return found[0]
}

func matching[T any](
	t testing.TB, q *Queue, queue string, match func(args T) bool, in []codeq.State,
) (found []*Task[T]) {
	t.Helper()
	for _, info := range q.list(t, queue, in...) {
		args, err := decode[T](info.Payload)
		if match == nil || err == nil && match(args) {
			found = append(found, &Task[T]{info, args})
		}
	}
	return found
}

// decode decodes a payload as in codeq.Handle.
func decode[T any](payload []byte) (args T, err error) {
	if raw, ok := any(&args).(*[]byte); ok {
		*raw = payload
	} else if len(payload) > 0 {
		err = json.Unmarshal(payload, &args)
	}
	return args, err
}

var states = []codeq.State{
	codeq.Ready, codeq.Scheduled, codeq.Blocked, codeq.Leased, codeq.Dead, codeq.Done, codeq.Canceled,
}

// list returns the tasks of a queue, or of all if queue is "", that are in some states, in the
// order of their production.
func (q *Queue) list(t testing.TB, queue string, in ...codeq.State) []*codeq.TaskInfo {
	t.Helper()
	tasks, err := q.find(queue, in)
	if err != nil {
		t.Fatalf("codeqtest: %v", err)
	}
	return tasks
}

func (q *Queue) find(queue string, in []codeq.State) ([]*codeq.TaskInfo, error) {
	q.settle()                                  // so that no task changes its state meanwhile
	found := make(map[codeq.ID]*codeq.TaskInfo) // a task may be seen twice without a bubble
	for _, state := range in {
		for info, err := range q.List(context.Background(), codeq.ListOptions{Queue: queue, State: state}) {
			if err != nil {
				return nil, fmt.Errorf("list %s tasks: %w", state, err)
			}
			found[info.ID] = info
		}
	}
	tasks := make([]*codeq.TaskInfo, 0, len(found))
	for _, info := range found {
		tasks = append(tasks, info)
	}
	slices.SortFunc(tasks, func(a, b *codeq.TaskInfo) int { return bytes.Compare(a.ID[:], b.ID[:]) })
	return tasks, nil
}

// The bounds of a failure message: tasks, and bytes of a payload.
const (
	describeMax        = 20
	describeMaxPayload = 200
)

// describe returns the tasks of list as text for a failure message.
func (q *Queue) describe(queue string, in ...codeq.State) string {
	tasks, err := q.find(queue, in)
	if err != nil {
		return fmt.Sprintf("(cannot list its tasks: %v)\n", err)
	}
	var b strings.Builder
	if len(tasks) == 0 {
		b.WriteString("no such tasks; queues with tasks:")
		stats, _ := q.Stats(context.Background()) // list has just succeeded
		var names []string
		for name, c := range stats {
			if c.Total() > 0 {
				names = append(names, fmt.Sprintf("%q", name))
			}
		}
		slices.Sort(names)
		if len(names) == 0 {
			names = []string{"none"}
		}
		fmt.Fprintf(&b, " %s\n", strings.Join(names, ", "))
		return b.String()
	}
	fmt.Fprintf(&b, "found by %s:\n", time.Now().Format(time.RFC3339Nano))
	for i, info := range tasks {
		if i == describeMax {
			fmt.Fprintf(&b, "  and %d more\n", len(tasks)-i)
			break
		}
		b.WriteString(line(info))
	}
	return b.String()
}

// line returns a task as a line of a failure message.
func line(info *codeq.TaskInfo) string {
	var b strings.Builder
	fmt.Fprintf(&b, "  %s %-9s %s %s", info.Queue, info.State, info.ID, text(info.Payload))
	if info.Tenant != "" {
		fmt.Fprintf(&b, ", tenant %q", info.Tenant)
	}
	if info.Priority != 0 {
		fmt.Fprintf(&b, ", priority %d", info.Priority)
	}
	if info.State == codeq.Scheduled || info.State == codeq.Leased {
		fmt.Fprintf(&b, ", until %s", info.At.Format(time.RFC3339Nano))
	}
	if info.Attempts > 0 {
		fmt.Fprintf(&b, ", attempts: %d", info.Attempts)
	}
	if info.LastError != "" {
		fmt.Fprintf(&b, ", last error: %s", text([]byte(info.LastError)))
	}
	b.WriteByte('\n')
	return b.String()
}

// text returns a payload unchanged if it is one line of text, otherwise quoted.
func text(b []byte) string {
	short, dots := b, ""
	if len(b) > describeMaxPayload {
		short, dots = b[:describeMaxPayload], "..."
	}
	if len(b) == 0 || !utf8.Valid(short) || bytes.ContainsFunc(short, func(r rune) bool { return r < ' ' }) {
		return fmt.Sprintf("%q%s", short, dots)
	}
	return string(short) + dots
}
