package main

import (
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/term"
)

// progress reports the progress of a long command: each second on a terminal, otherwise after 1, 2,
// 4 ... seconds, then once a minute.
type progress struct {
	a     *app
	begun time.Time
	last  atomic.Pointer[step]
	once  sync.Once
	stop  chan struct{} // closed by end
	ended chan struct{} // closed by run
}

// step is the progress of a run.
type step struct {
	what        string
	done, total uint64
}

// mostRarely is the maximum time between two reports.
const mostRarely = time.Minute

// progress starts reports, until end is called.
func (a *app) progress() *progress {
	p := &progress{a: a, begun: time.Now(), stop: make(chan struct{}), ended: make(chan struct{})}
	p.last.Store(&step{what: "beginning"})
	go p.run()
	return p
}

// tell sets the progress of the run.
func (p *progress) tell(what string, done, total uint64) { p.last.Store(&step{what, done, total}) }

func (p *progress) run() {
	defer close(p.ended)
	f, isFile := p.a.err.(*os.File)
	terminal := isFile && term.IsTerminal(int(f.Fd()))
	next := time.Second
	for {
		select {
		case <-p.stop:
			return
		case <-time.After(time.Until(p.begun.Add(next))):
		}
		if s := p.last.Load(); s.total > 0 {
			p.a.note("codeq: %v: %s: %d of %d tasks", next, s.what, s.done, s.total)
		} else {
			p.a.note("codeq: %v: %s", next, s.what)
		}
		if terminal {
			next += time.Second
		} else {
			next += min(next, mostRarely)
		}
	}
}

// end stops the reports and waits for the goroutine. It may be called again.
func (p *progress) end() {
	p.once.Do(func() { close(p.stop) })
	<-p.ended
}
