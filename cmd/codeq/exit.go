package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"text/tabwriter"

	"github.com/urfave/cli/v3"

	"codeq"
)

// The exit codes of the process. Scripts branch on them: they stay as they are.
const (
	exitOK        = 0
	exitOther     = 1
	exitUsage     = 2
	exitNotFound  = 3
	exitRefused   = 4
	exitNoQueue   = 5
	exitInUse     = 6
	exitDamaged   = 7
	exitDenied    = 8
	exitNotNow    = 9
	exitUncertain = 10
	exitEnded     = 130
)

var exitMeanings = []struct {
	code int
	text string
}{
	{exitOK, "done"},
	{exitOther, "another error"},
	{exitUsage, "the command line is wrong, or the queue refuses an argument; nothing was changed"},
	{exitNotFound, "no such task, schedule, worker or node"},
	{exitRefused, "refused because of the state of a task, a taken idempotency key, or a node that cannot lead"},
	{exitNoQueue, "there is no queue in the directory, or no dashboard at the URL"},
	{exitInUse, "another process has the directory open, and does not serve it to this one, or the verb needs a closed directory"},
	{exitDamaged, "stored data is damaged, or of a format that this version does not know"},
	{exitDenied, "no permission"},
	{exitNotNow, "not possible now: no leader, no room on the disk, storage that failed or hangs, too many requests, no answer, no process that has the queue open"},
	{exitUncertain, "it is not known whether the change was made"},
	{exitEnded, "ended by a signal, or by -timeout"},
}

// exitText is the part of the help about exit codes.
func exitText() string {
	var b strings.Builder
	b.WriteString("Exit codes:\n")
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	for _, m := range exitMeanings {
		_, _ = fmt.Fprintf(w, "%d\t  %s\n", m.code, m.text) // a Builder takes everything
	}
	_ = w.Flush()
	return strings.TrimRight(b.String(), "\n")
}

// codedError is an error with its own exit code, which precedes those of errorCodes.
type codedError struct {
	error
	code int
}

func (e *codedError) Unwrap() error { return e.error }

// coded adds an exit code to an error.
func coded(code int, err error) error { return &codedError{err, code} }

// usageOf returns the error of a wrong command line, with a hint at its help.
func usageOf(c *cli.Command, err error) error {
	return coded(exitUsage, fmt.Errorf("%w (see: %s -help)", err, c.FullName()))
}

func usagef(c *cli.Command, format string, args ...any) error {
	return usageOf(c, fmt.Errorf(format, args...))
}

// errorCodes maps errors to exit codes; the first match counts.
var errorCodes = []struct {
	err  error
	code int
}{
	{codeq.ErrUncertain, exitUncertain},
	{codeq.ErrCorrupt, exitDamaged},
	{codeq.ErrFormat, exitDamaged},
	{codeq.ErrCopied, exitDamaged},
	{codeq.ErrLocked, exitInUse},
	{codeq.ErrNotServed, exitInUse},
	{fs.ErrPermission, exitDenied},
	{codeq.ErrNotQueue, exitNoQueue},
	{codeq.ErrDuplicate, exitRefused},
	{codeq.ErrNotWaiting, exitRefused},
	{codeq.ErrNotEmpty, exitRefused},
	{codeq.ErrCannotLead, exitRefused},
	{codeq.ErrNoMajority, exitRefused},
	{codeq.ErrNoCluster, exitRefused},
	{codeq.ErrNotMember, exitRefused},
	{codeq.ErrShardCount, exitRefused},
	{codeq.ErrNotFound, exitNotFound},
	{codeq.ErrDiskFull, exitNotNow},
	{codeq.ErrNotLeader, exitNotNow},
	{codeq.ErrFailed, exitNotNow},
	{codeq.ErrStalled, exitNotNow},
	{codeq.ErrClosed, exitNotNow},
	{codeq.ErrInvalid, exitUsage},
	{errors.ErrUnsupported, exitUsage},
	{context.Canceled, exitEnded},
	{context.DeadlineExceeded, exitEnded},
	{fs.ErrNotExist, exitNoQueue},
}

// exitCode returns the exit code of an error; nil: 0.
func exitCode(err error) int {
	if err == nil {
		return exitOK
	}
	if c := (*codedError)(nil); errors.As(err, &c) {
		return c.code
	}
	for _, e := range errorCodes {
		if errors.Is(err, e.err) {
			return e.code
		}
	}
	return exitOther
}
