// Package command has the flags that commands share, and the steps before a measurement.
package command

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"codeq/bench/report/internal/document"
)

// Options are flags that several commands have.
type Options struct {
	Out, Dir       string
	Only           regexp.Regexp
	Warmup, Window time.Duration
	Profiles       string
}

// Directories declares -out and -dir.
func (o *Options) Directories(f *flag.FlagSet) {
	f.StringVar(&o.Out, "out", ".", "write the results into `DIR`")
	f.StringVar(&o.Dir, "dir", os.TempDir(), "`DIR` is on the disk to measure; data in it is removed at the end")
}

// Windows declares -only, -warmup and -window.
func (o *Options) Windows(f *flag.FlagSet, only string, warmup, window time.Duration) {
	f.TextVar(&o.Only, "only", regexp.MustCompile(""), "measure the "+only+" match `REGEXP`")
	f.DurationVar(&o.Warmup, "warmup", warmup, "run each load for this `TIME` before its window")
	f.DurationVar(&o.Window, "window", window, "measure each load for this `TIME`")
}

// Profile declares -profiles.
func (o *Options) Profile(f *flag.FlagSet) {
	f.StringVar(&o.Profiles, "profiles", "", "keep profiles of the windows in `DIR`, which take some processor time")
}

// Begin creates the directory of the results, makes Dir absolute, and describes the machine and
// Dir's disk.
func (o *Options) Begin() (m document.Machine, err error) {
	if err := os.MkdirAll(o.Out, 0o755); err != nil {
		return m, err
	}
	if o.Dir, err = filepath.Abs(o.Dir); err != nil {
		return m, err
	}
	return document.ThisMachine(o.Dir)
}

// Progress writes a message to the standard error.
func Progress(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }
