package main

import (
	"io"
	"os"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"
)

// progress is a progress bar on a terminal. Elsewhere it shows nothing.
type progress struct {
	bar *progressbar.ProgressBar // nil: no terminal
}

func newProgress(w io.Writer) *progress {
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return &progress{}
	}
	return &progress{progressbar.NewOptions64(1,
		progressbar.OptionSetWriter(f),
		progressbar.OptionSetDescription("files"),
		progressbar.OptionShowCount(),
		progressbar.OptionShowIts(),
		progressbar.OptionSetItsString("files"),
		progressbar.OptionUseANSICodes(true),
	)}
}

// show draws the bar. REQUIRES: done < total, since the bar library ends at a full bar, though
// total may still grow.
func (p *progress) show(done, total uint64) {
	if p.bar == nil {
		return
	}
	if p.bar.GetMax64() != int64(total) {
		p.bar.ChangeMax64(int64(total))
	}
	_ = p.bar.Set64(int64(done)) // an error of the bar does not matter
}

// clear removes the bar.
func (p *progress) clear() {
	if p.bar != nil {
		_ = p.bar.Clear()
	}
}
