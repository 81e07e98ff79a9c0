package queuetest

import (
	"context"
	"errors"
	"iter"
	"path/filepath"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"codeq"
)

// verbsOf is everyVerb with arguments of the caller's. The verbs are given a nil context
// as they are any other.
func VerbsOf(t *testing.T, q *codeq.Queue, m *codeq.Mux, tasks []codeq.Task, ids []codeq.ID) map[string]func(context.Context) error {
	var turn atomic.Int64
	next := func() int { return int(turn.Add(1)) % len(ids) }
	arguments := map[reflect.Type]func() any{
		reflect.TypeFor[codeq.ID]():        func() any { return ids[next()] },
		reflect.TypeFor[codeq.Receipt]():   func() any { return codeq.Receipt{ID: ids[next()], Token: 1} },
		reflect.TypeFor[[]codeq.Receipt](): func() any { return []codeq.Receipt{{ID: ids[next()], Token: 1}, {ID: ids[next()], Token: 1}} },
		reflect.TypeFor[[]codeq.Completion](): func() any {
			return []codeq.Completion{{Receipt: codeq.Receipt{ID: ids[next()], Token: 1}, Next: tasks}}
		},
		reflect.TypeFor[[]codeq.Failure]():    func() any { return []codeq.Failure{{Receipt: codeq.Receipt{ID: ids[next()], Token: 1}}} },
		reflect.TypeFor[codeq.UniqueKey]():    func() any { return codeq.UniqueKey{Queue: "verbs", Key: "k"} },
		reflect.TypeFor[codeq.Task]():         func() any { return tasks[0] },
		reflect.TypeFor[[]codeq.Task]():       func() any { return tasks },
		reflect.TypeFor[codeq.ClaimRequest](): func() any { return codeq.ClaimRequest{Queues: []string{"verbs"}, NoWait: next() > 0} },
		reflect.TypeFor[codeq.RetryOptions](): func() any { return codeq.RetryOptions{} },
		reflect.TypeFor[codeq.ListOptions]():  func() any { return codeq.ListOptions{State: codeq.Ready} },
		reflect.TypeFor[codeq.PageOptions]():  func() any { return codeq.PageOptions{Limit: 2} },
		reflect.TypeFor[codeq.BulkOptions](): func() any {
			return codeq.BulkOptions{Action: codeq.BulkSetPriority, Priority: 1, TaskFilter: codeq.TaskFilter{Queue: "verbs"}}
		},
		reflect.TypeFor[codeq.DeadFilter]():       func() any { return codeq.DeadFilter{Queue: "verbs"} },
		reflect.TypeFor[codeq.SubscribeOptions](): func() any { return codeq.SubscribeOptions{} },
		reflect.TypeFor[codeq.Schedule]():         func() any { return codeq.Schedule{Name: "verbs", Every: time.Hour, Task: codeq.Task{Queue: "verbs"}} },
		reflect.TypeFor[codeq.Peer]():             func() any { return codeq.Peer{Node: "peer", Address: "address"} },
		reflect.TypeFor[*codeq.Mux]():             func() any { return m },
		reflect.TypeFor[*codeq.RunOptions]():      func() any { return &codeq.RunOptions{} },
		reflect.TypeFor[func(*codeq.Settings)]():  func() any { return func(s *codeq.Settings) { s.Retention = time.Hour } },
		reflect.TypeFor[map[string]codeq.Settings](): func() any {
			return map[string]codeq.Settings{"verbs": {Burst: 1 + next()}}
		},
		reflect.TypeFor[string]():                func() any { return "verbs" },
		reflect.TypeFor[any]():                   func() any { return 1 },
		reflect.TypeFor[[]codeq.PayloadOption](): func() any { return []codeq.PayloadOption(nil) },
		reflect.TypeFor[[]string]():              func() any { return []string{"verbs"} },
		reflect.TypeFor[[]byte]():                func() any { return []byte("result") },
		reflect.TypeFor[error]():                 func() any { return errors.New("cause") },
		reflect.TypeFor[time.Duration]():         func() any { return time.Hour },
		reflect.TypeFor[time.Time]():             func() any { return time.Now().Add(time.Hour) },
		reflect.TypeFor[int]():                   func() any { return next() },
	}
	verbs := make(map[string]func(context.Context) error)
	typ := reflect.TypeFor[*codeq.Queue]()
	for i := range typ.NumMethod() {
		method := typ.Method(i)
		if method.Name == "Close" {
			continue
		}
		verbs[method.Name] = func(ctx context.Context) error {
			args := []reflect.Value{reflect.ValueOf(q)}
			for n := 1; n < method.Type.NumIn(); n++ {
				in := method.Type.In(n)
				if in == reflect.TypeFor[context.Context]() {
					args = append(args, reflect.ValueOf(&ctx).Elem())
				} else if f := arguments[in]; f != nil {
					args = append(args, reflect.ValueOf(f()))
				} else {
					return errors.New("no argument of type " + in.String())
				}
			}
			call := method.Func.Call
			if method.Type.IsVariadic() {
				call = method.Func.CallSlice
			}
			var err error
			for _, result := range call(args) {
				err = errors.Join(err, exhaust(ctx, result.Interface()))
			}
			return err
		}
	}
	copies := filepath.Join(t.TempDir(), "verbs") // it is the only verb that takes a path
	verbs["Checkpoint"] = func(ctx context.Context) error { return q.Checkpoint(ctx, copies) }
	return verbs
}

// exhaust reads a result to its end. It returns the error that the result is, or has.
func exhaust(ctx context.Context, result any) error {
	switch r := result.(type) {
	case error:
		return r
	case iter.Seq2[*codeq.TaskInfo, error]:
		for _, err := range r {
			if err != nil {
				return err
			}
		}
	case *codeq.Subscription:
		if r == nil {
			return nil
		}
		defer r.Close()
		for range 10 {
			if _, err := r.Next(ctx); err != nil {
				return err
			}
		}
	default:
		if name := reflect.TypeOf(result); name != nil && strings.HasPrefix(name.String(), "iter.") {
			return errors.New("nobody reads " + name.String())
		}
	}
	return nil
}

// takesContext reports whether a method of *Queue has a context among its arguments.
func TakesContext(name string) bool {
	method, _ := reflect.TypeFor[*codeq.Queue]().MethodByName(name)
	return method.Type.NumIn() > 1 && method.Type.In(1) == reflect.TypeFor[context.Context]()
}
