package peers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/prometheus/procfs"
)

// errMissing says that a program of a peer is not installed.
var errMissing = errors.New("not installed")

// server is a process of another program, the leader of its own process group. It is killed
// whenever this process ends.
type server struct {
	cmd    *exec.Cmd
	stopBy syscall.Signal // asks it to end at once
	log    string         // file of its output
	exited chan struct{}  // closed by the goroutine that waits for it
}

// startServer starts a program, and waits until ready returns nil.
func startServer(ctx context.Context, dir string, as *syscall.Credential, stopBy syscall.Signal,
	ready func(context.Context) error, program string, args ...string) (*server, error) {
	s := &server{stopBy: stopBy, log: filepath.Join(dir, filepath.Base(program)+".log"), exited: make(chan struct{})}
	out, err := os.Create(s.log)
	if err != nil {
		return nil, err
	}
	defer func() { _ = out.Close() }()
	s.cmd = exec.Command(program, args...)
	s.cmd.Dir = dir
	s.cmd.Stdout, s.cmd.Stderr = out, out
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL, Credential: as}
	if err := s.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", program, err)
	}
	go func() {
		_ = s.cmd.Wait()
		close(s.exited)
	}()
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for {
		err := ready(ctx)
		if err == nil {
			return s, nil
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-s.exited:
			return nil, errors.Join(fmt.Errorf("%s ended at its start: %s", program, s.tail()), s.stop())
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("%s did not become ready: %w: %w: %s", program, ctx.Err(), err, s.tail()), s.stop())
		}
	}
}

// stop ends the process and its group.
func (s *server) stop() error {
	_ = s.cmd.Process.Signal(s.stopBy) // fails if it has ended
	var err error
	select {
	case <-s.exited:
	case <-time.After(5 * time.Second):
		err = fmt.Errorf("%s did not end when it was asked to", s.cmd.Path)
	}
	_ = syscall.Kill(-s.cmd.Process.Pid, syscall.SIGKILL) // fails if none is left
	<-s.exited
	return err
}

// tail returns the last line of the output.
func (s *server) tail() string {
	b, err := os.ReadFile(s.log)
	if err != nil {
		return err.Error()
	}
	return lastLine(b)
}

func lastLine(b []byte) string {
	lines := bytes.Split(bytes.TrimSpace(b), []byte("\n"))
	return string(bytes.TrimSpace(lines[len(lines)-1]))
}

// cpu returns the processor time of the process and its descendants, also of ended ones.
func (s *server) cpu() time.Duration {
	processes, _ := procfs.AllProcs()
	all := make(map[int]procfs.ProcStat)
	for _, p := range processes {
		if stat, err := p.Stat(); err == nil { // else it has ended
			all[p.PID] = stat
		}
	}
	var sum time.Duration
	for pid, p := range all {
		for at := pid; at > 1; at = all[at].PPID {
			if at == s.cmd.Process.Pid {
				sum += time.Duration(int(p.UTime+p.STime)+p.CUTime+p.CSTime) * clockTick
				break
			}
		}
	}
	return sum
}

// clockTick is the unit of times in /proc; USER_HZ is 100 on every architecture
// of Go but alpha.
const clockTick = time.Second / 100

// program finds a program in PATH, or else the last match of a pattern.
func program(name, pattern string) (string, error) {
	if path, err := exec.LookPath(name); err == nil {
		return path, nil
	}
	if found, _ := filepath.Glob(pattern); len(found) > 0 {
		return found[len(found)-1], nil
	}
	return "", fmt.Errorf("%s: %w", name, errMissing)
}

// freePort returns a port of loopback that has just been free.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	return l.Addr().(*net.TCPAddr).Port, l.Close()
}

// place returns the program of a server and a free address for it.
func place(name, pattern string) (path, addr, port string, err error) {
	if path, err = program(name, pattern); err != nil {
		return "", "", "", err
	}
	n, err := freePort()
	port = strconv.Itoa(n)
	return path, net.JoinHostPort("127.0.0.1", port), port, err
}
