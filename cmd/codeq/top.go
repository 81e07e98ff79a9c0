package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/mattn/go-runewidth"
	"github.com/urfave/cli/v3"
	"golang.org/x/term"

	"codeq"
)

func (a *app) topCommand() *cli.Command {
	return &cli.Command{
		Name: "top", Category: categorySee, Usage: "watch queues and workers live",
		Description: "Shows the queues with their rates, and the workers. In a terminal, q ends it, s sorts by the next\n" +
			"column, and j, k or the arrows scroll. Elsewhere each sample is written below the previous one.\n" +
			"A closed directory is opened for each sample only, so that workers may open it meanwhile.",
		Flags: []cli.Flag{
			&cli.DurationFlag{Name: "interval", Value: time.Second, Usage: "the `TIME` between two samples"},
			&cli.IntFlag{Name: "n", Usage: "end after `N` samples; 0: at a key or a signal"},
			&cli.StringFlag{Name: "sort", Value: "queue", Usage: "sort by this `COLUMN`: " + strings.Join(sortNames(), ", ")},
		},
		Action: a.top,
	}
}

// sample is the state of a queue at one time.
type sample struct {
	Time    time.Time
	At      where
	Queues  []codeq.QueueInfo
	Workers []codeq.WorkerInfo `json:",omitempty"`
	Error   string             `json:",omitzero"` // the error of the next sample
}

// sampler samples a target. Other processes may open and close it meanwhile.
type sampler struct {
	t    *target
	v    view // nil: not open
	at   where
	last sample
}

// take takes a sample. It returns an error only if the first one fails, or ctx ends.
func (s *sampler) take(ctx context.Context) (sample, error) {
	next, err := s.try(ctx)
	if err != nil && s.v != nil && ctx.Err() == nil { // another process may serve now
		s.close()
		next, err = s.try(ctx)
	}
	switch {
	case err == nil:
		s.last = next
	case s.last.Time.IsZero() || ctx.Err() != nil:
		return next, err
	default:
		s.close()
		s.last.Error = err.Error()
	}
	return s.last, nil
}

func (s *sampler) try(ctx context.Context) (sample, error) {
	if s.v == nil {
		v, at, err := s.t.look(ctx)
		if err != nil {
			return sample{}, err
		}
		s.v, s.at = v, at
	}
	n := sample{Time: s.t.app.now(), At: s.at}
	var err error
	if n.Queues, err = s.v.Info(ctx); err != nil {
		return n, err
	}
	if q, ok := s.v.(steerer); ok {
		n.Workers, err = q.Workers(ctx)
	} else {
		s.close() // others may open it
	}
	return n, err
}

func (s *sampler) close() {
	if s.v != nil {
		_ = s.v.Close() // it was only read
	}
	s.v = nil
}

func (a *app) top(ctx context.Context, c *cli.Command) error {
	t, err := a.target(c)
	if err != nil {
		return err
	}
	interval := c.Duration("interval")
	if interval < 10*time.Millisecond {
		return usagef(c, "-interval %s is less than 10ms", interval)
	}
	screen := &screen{app: a}
	if screen.sort = slices.Index(sortNames(), c.String("sort")); screen.sort < 0 {
		return usagef(c, "-sort %q is none of %v", c.String("sort"), sortNames())
	}
	s := &sampler{t: t}
	defer s.close()
	screen.now, err = s.take(ctx)
	if err != nil {
		return err
	}
	show, keys, restore, err := a.topScreen(screen)
	if err != nil {
		return err
	}
	err = watch(ctx, c.Int("n"), interval, s, screen, show, keys)
	restore()
	if ctx.Err() != nil && !errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
		return nil // the usual end
	}
	return err
}

// watch shows a sample each interval, n of them or until a key or ctx ends it.
func watch(ctx context.Context, n int, interval time.Duration, s *sampler, screen *screen, show func() error, keys <-chan byte) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for shown := 0; ; {
		if err := show(); err != nil {
			return err
		}
		if shown++; shown == n {
			return nil
		}
		for ticked := false; !ticked; {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case key := <-keys:
				if screen.press(key) {
					return nil
				}
				if err := show(); err != nil {
					return err
				}
			case <-tick.C:
				before := screen.now
				now, err := s.take(ctx)
				if err != nil {
					return err
				}
				if screen.now = now; now.Time != before.Time {
					screen.before = before
				}
				ticked = true
			}
		}
	}
}

// topScreen prepares the output. It returns a function that shows a sample, the pressed keys, and a
// function that restores the terminal.
func (a *app) topScreen(s *screen) (show func() error, keys <-chan byte, restore func(), err error) {
	out := terminalOf(a.out)
	switch {
	case a.asJSON:
		return func() error { return a.json(s.now) }, nil, func() {}, nil
	case out == nil:
		return func() error {
			_, err := io.WriteString(a.out, strings.Join(s.lines(), "\n")+"\n\n")
			return err
		}, nil, func() {}, nil
	}
	undo, err := enableEscapes(out)
	if err != nil {
		return nil, nil, nil, err
	}
	restore = undo
	if in := terminalOf(a.in); in != nil {
		state, err := term.MakeRaw(int(in.Fd()))
		if err != nil {
			return nil, nil, nil, err
		}
		restore = func() {
			_ = term.Restore(int(in.Fd()), state) // nothing else can be done
			undo()
		}
		keys = readKeys(in)
	}
	leave := restore
	restore = func() {
		_, _ = io.WriteString(out, "\x1b[?25h\x1b[?1049l") // the cursor, and the screen of before
		leave()
	}
	if _, err := io.WriteString(out, "\x1b[?1049h\x1b[?25l"); err != nil {
		restore()
		return nil, nil, nil, err
	}
	return func() error { return s.draw(out) }, keys, restore, nil
}

// readKeys sends the pressed keys. Its goroutine ends with in, or with the process.
func readKeys(in *os.File) <-chan byte {
	keys := make(chan byte)
	go func() {
		b := make([]byte, 1)
		for {
			if _, err := in.Read(b); err != nil {
				return
			}
			keys <- b[0]
		}
	}()
	return keys
}

// screen shows samples. Its lines have no escape sequences but those of draw.
type screen struct {
	app         *app
	now, before sample // before: zero at first
	sort, from  int    // the column of the sort order, and the first shown queue
	escape      int    // bytes read of an arrow key's sequence
}

// rate is a queue with its rates per second.
type rate struct {
	codeq.QueueInfo
	in, out, failed float64
	known           bool
}

// columns lists the sort orders; numbers are descending.
var columns = []struct {
	name string
	less func(a, b *rate) int
}{
	{"queue", func(a, b *rate) int { return cmp.Compare(a.Queue, b.Queue) }},
	{"ready", func(a, b *rate) int { return cmp.Compare(b.Counts.Ready, a.Counts.Ready) }},
	{"leased", func(a, b *rate) int { return cmp.Compare(b.Counts.Leased, a.Counts.Leased) }},
	{"dead", func(a, b *rate) int { return cmp.Compare(b.Counts.Dead, a.Counts.Dead) }},
	{"in", func(a, b *rate) int { return cmp.Compare(b.in, a.in) }},
	{"out", func(a, b *rate) int { return cmp.Compare(b.out, a.out) }},
	{"failed", func(a, b *rate) int { return cmp.Compare(b.failed, a.failed) }},
}

func sortNames() []string {
	names := make([]string, len(columns))
	for i, c := range columns {
		names[i] = c.name
	}
	return names
}

// press handles a key, and reports whether it ends the screen.
func (s *screen) press(key byte) (end bool) {
	switch {
	case s.escape == 1 && key == '[':
		s.escape = 2
		return false
	case s.escape == 2 && key == 'A':
		key = 'k'
	case s.escape == 2 && key == 'B':
		key = 'j'
	}
	s.escape = 0
	switch key {
	case 'q', 3, 4: // also Ctrl-C and Ctrl-D, which are keys in a raw terminal
		return true
	case 0x1b:
		s.escape = 1
	case 's':
		s.sort = (s.sort + 1) % len(columns)
	case 'j':
		s.from = min(s.from+1, max(0, len(s.now.Queues)-1))
	case 'k':
		s.from = max(0, s.from-1)
	}
	return false
}

func (s *screen) rates() []rate {
	before := make(map[string]codeq.Totals, len(s.before.Queues))
	for _, q := range s.before.Queues {
		before[q.Queue] = q.Totals
	}
	seconds := s.now.Time.Sub(s.before.Time).Seconds()
	list := make([]rate, len(s.now.Queues))
	for i, q := range s.now.Queues {
		list[i].QueueInfo = q
		if s.before.Time.IsZero() || seconds <= 0 {
			continue
		}
		was := before[q.Queue] // zero for a new queue
		per := func(now, was uint64) float64 {
			if now < was {
				return 0
			}
			return float64(now-was) / seconds
		}
		list[i].known = true
		list[i].in, list[i].out = per(q.Totals.Produced, was.Produced), per(q.Totals.Completed, was.Completed)
		list[i].failed = per(failures(q.Totals), failures(was))
	}
	slices.SortStableFunc(list, func(a, b rate) int {
		return cmp.Or(columns[s.sort].less(&a, &b), cmp.Compare(a.Queue, b.Queue))
	})
	return list
}

// lines returns the text of the screen.
func (s *screen) lines() []string {
	a, n := s.app, &s.now
	list := s.rates()
	var sum codeq.Counts
	var in, out, failed float64
	for i := range list {
		c := &list[i].Counts
		sum.Ready, sum.Scheduled, sum.Blocked = sum.Ready+c.Ready, sum.Scheduled+c.Scheduled, sum.Blocked+c.Blocked
		sum.Leased, sum.Dead = sum.Leased+c.Leased, sum.Dead+c.Dead
		in, out, failed = in+list[i].in, out+list[i].out, failed+list[i].failed
	}
	place := n.At.Dir
	if n.At.URL != "" {
		place = n.At.URL
	}
	head := fmt.Sprintf("codeq %s (%s)  %s", place, n.At.Kind, a.time(n.Time))
	lines := []string{
		safe(head),
		fmt.Sprintf("ready %d  scheduled %d  blocked %d  leased %d  dead %d   in %s/s  out %s/s  failed %s/s",
			sum.Ready, sum.Scheduled, sum.Blocked, sum.Leased, sum.Dead, perSecond(in), perSecond(out), perSecond(failed)),
	}
	if n.Error != "" {
		lines = append(lines, safe("no newer numbers: "+n.Error))
	}
	t := newTable("QUEUE", ">READY", ">SCHED", ">BLOCKED", ">LEASED", ">DEAD", ">OLDEST", ">IN/S", ">OUT/S", ">FAILED/S", "STATE")
	for i := range list {
		r := &list[i]
		rates := []string{"-", "-", "-"}
		if r.known {
			rates = []string{perSecond(r.in), perSecond(r.out), perSecond(r.failed)}
		}
		c := r.Counts
		t.add(clip(r.Queue, 40), c.Ready, c.Scheduled, c.Blocked, c.Leased, c.Dead, a.age(r.OldestReady), rates[0], rates[1], rates[2], queueState(&r.QueueInfo))
	}
	queues := t.lines()
	lines = append(append(lines, "", queues[0]), queues[1+min(s.from, len(list)):]...)
	if len(n.Workers) > 0 {
		lines = append(append(lines, ""), a.workerTable(n.Workers).lines()...)
	}
	return lines
}

func perSecond(f float64) string {
	if f != 0 && f < 10 {
		return fmt.Sprintf("%.1f", f)
	}
	return fmt.Sprintf("%.0f", f)
}

// draw fills the terminal.
func (s *screen) draw(out *os.File) error {
	width, height, err := term.GetSize(int(out.Fd()))
	if err != nil || width < 1 || height < 1 {
		width, height = 80, 24
	}
	lines := append(s.lines(), "")
	if len(lines) > height-1 {
		lines = lines[:max(1, height-1)]
	}
	lines = append(lines, "q: end  s: sort (by "+columns[s.sort].name+")  j, k: scroll")
	var b strings.Builder
	b.WriteString("\x1b[H")
	for i, line := range lines {
		if i > 0 {
			b.WriteString("\r\n")
		}
		b.WriteString(runewidth.Truncate(line, width, "") + "\x1b[K")
	}
	b.WriteString("\x1b[J")
	_, err = io.WriteString(out, b.String())
	return err
}
