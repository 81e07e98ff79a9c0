package platform

import (
	"os"
	"strings"
)

// BootID returns a text that is the same until the machine boots again, and has lost the writes
// that were not on its disks. It is empty if the system does not tell.
func BootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}
