package codeqweb

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"codeq"
)

// What holds back tasks that wait for nothing but a worker, and how tasks run and end.

func (w *waits) ready() (all []sentence) {
	s := say("It has been ready for ", since(w.t.At))
	switch before, ok := w.before(); {
	case !ok:
	case before < 0:
		s = say(s, "; more than "+number(asked)+" ready tasks go before it")
	case before == 0:
		s = say(s, "; it goes next")
	default:
		s = say(s, "; "+count(before, "ready task goes", "ready tasks go")+" before it")
	}
	if w.stored.Tenant != "" {
		s = say(s, " in its tenant")
	}
	all = append(all, say(s, "."))
	queue := queueOf(w.stored.Queue)
	if w.settings.Paused {
		return append(all, say("The queue ", queue, " is paused: nothing is claimed from it."))
	}
	if n := w.settings.Concurrency; n > 0 && int(w.row.Counts.Leased)+w.row.Held >= n {
		all = append(all, say("All ", count(n, "place", "places"), " of the queue ", queue, " are taken (Concurrency)."))
		all = append(all, w.held()...)
	}
	if w.settings.Rate > 0 {
		all = append(all, say(fmt.Sprintf("At most %g tasks a second are claimed from the queue ", w.settings.Rate), queue, " (Rate)."))
	}
	return append(all, w.workers()...)
}

// before counts the ready tasks of the tenant that are claimed before the task; negative: there are
// more than asked.
func (w *waits) before() (n int, ok bool) {
	page, err := w.d.q.ListPage(w.ctx, codeq.PageOptions{
		TaskFilter: codeq.TaskFilter{States: []codeq.State{codeq.Ready}, Queue: w.stored.Queue, Tenants: []string{w.stored.Tenant}},
		NoPayload:  true, Limit: asked,
	})
	if err != nil {
		return 0, false
	}
	n = slices.IndexFunc(page.Tasks, func(t *codeq.TaskInfo) bool { return t.ID == w.stored.ID })
	return n, n >= 0 || page.Next != ""
}

// workers says why no worker takes the task.
func (w *waits) workers() []sentence {
	if w.sample == nil {
		return nil
	}
	var all, quiet, places, busy int
	for _, worker := range w.sample.Workers {
		switch {
		case worker.LastError != "":
			return []sentence{say("The node ", name(worker.Node), " does not say which workers it has.")}
		case !slices.Contains(worker.Queues, w.stored.Queue):
			continue
		case worker.Quiet:
			quiet++
		default:
			places, busy = places+worker.Concurrency, busy+worker.Busy
		}
		all++
	}
	switch queue := queueOf(w.stored.Queue); {
	case all == 0:
		return []sentence{say("No Queue.Run works for the queue ", queue, ". Programs that claim tasks themselves are not known.")}
	case quiet == all:
		return []sentence{say("All workers of the queue ", queue, " are quiet: they take no new tasks.")}
	case busy >= places:
		return []sentence{say("All ", count(places, "handler", "handlers"), " for the queue ", queue, " are busy.")}
	}
	return nil
}

func (w *waits) leased() []sentence {
	a := last(w.t)
	who := say("A worker without a name")
	if a.Worker != "" {
		who = say(name(a.Worker))
	}
	s := say(who, " works on it")
	if !a.Start.IsZero() {
		s = say(who, " has worked on it for ", since(a.Start))
	}
	s = say(s, ", in "+w.tried())
	if w.t.At.After(w.now) {
		s = say(s, "; its lease ends ", w.t.At, ", unless it is renewed.")
	} else {
		s = say(s, "; its lease ended ", w.t.At, ": the task comes back soon.")
	}
	all := []sentence{s}
	limit := w.t.Timeout
	if limit == 0 {
		limit = w.settings.Timeout
	}
	if ran := w.now.Sub(a.Start); limit > 0 && !a.Start.IsZero() {
		if ran > limit {
			all = append(all, say("It is "+span(ran-limit)+" beyond its timeout of "+span(limit)+"."))
		} else {
			all = append(all, say("Its timeout of "+span(limit)+" ends ", a.Start.Add(limit), "."))
		}
	}
	if p := w.t.Progress; !p.At.IsZero() && w.now.Sub(p.At) > time.Minute {
		all = append(all, say("Its handler has reported its progress ", p.At, "."))
	}
	return all
}

func (w *waits) ended() []sentence {
	a := last(w.t)
	by := sentence(nil)
	if a.Worker != "" {
		by = say(" by ", name(a.Worker))
	}
	switch w.stored.State {
	case codeq.Done:
		return []sentence{say("It was completed ", w.t.At, by, ", in ", w.tried(), ", "+between(w.t.ID.Time(), latest(w.t.ID.Time(), w.t.At))+" after it was produced.")}
	case codeq.Canceled:
		s := say("It was canceled ", w.t.At)
		if a.Outcome == codeq.EventCanceled {
			s = say(s, ", while it was at work", by)
		} else if w.t.Attempts == 0 {
			s = say(s, ", before its first attempt")
		}
		return []sentence{say(s, ".")}
	default: // dead
	}
	why := "was given up, without another, in "
	switch {
	case w.t.Attempts >= cmp.Or(w.t.MaxAttempts, w.settings.MaxAttempts, w.t.Attempts+1):
		why = "ran out of attempts with "
	case a.Outcome == codeq.EventExpired:
		why = "lost its last lease in "
	}
	all := []sentence{say("It "+why+w.tried()+", ", w.t.At, by, failure(w.t.LastError), ".")}
	if n := len(w.family.Children); n > 0 {
		all = append(all, say(count(n, "task waits", "tasks wait")+" for it, and "+goesOn(n)+" on when it is redriven and completed."))
	}
	if w.stored.Group != "" && w.settings.HoldGroups {
		all = append(all, say("Its group may wait for it: the queue holds groups for dead letters."))
	}
	return all
}

func goesOn(n int) string {
	if n == 1 {
		return "goes"
	}
	return "go"
}

// hung names the handlers of the task that go on after their end.
func (w *waits) hung() (all []sentence) {
	if w.sample == nil {
		return nil
	}
	for _, worker := range w.sample.Workers {
		for _, h := range worker.Hung {
			if h.ID == w.stored.ID {
				all = append(all, say("Its handler of attempt "+number(h.Attempt)+" on ", name(worker.Name), " goes on, though its time was over ", h.Since, "."))
			}
		}
	}
	return all
}

// belongs names the reason for the task.
func (w *waits) belongs() (all []sentence) {
	if id, ok := callerOf(w.t); ok {
		all = append(all, say("Its result is for ", id, ", whose handler has produced it."))
	}
	if death, ok := codeq.DeathOf(w.t.Headers); ok {
		all = append(all, say("It tells of the death of ", death.ID, " in the queue ", queueOf(death.Queue), "."))
	}
	return all
}

// callerOf returns the task with the handler that has produced a task by codeq.Child, from its key.
func callerOf(t *codeq.TaskInfo) (id codeq.ID, ok bool) {
	rest, ok := strings.CutPrefix(t.Unique.Key, "child ")
	if !ok {
		return id, false
	}
	var n int
	var text string
	if _, err := fmt.Sscanf(rest, "%d of %s", &n, &text); err != nil {
		return id, false
	}
	id, err := codeq.ParseID(text)
	return id, err == nil
}
