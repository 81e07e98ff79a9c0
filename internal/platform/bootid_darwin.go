package platform

import "syscall"

// BootID returns a text that is the same until the machine boots again, and has lost the writes
// that were not on its disks. It is empty if the system does not tell.
func BootID() string {
	id, err := syscall.Sysctl("kern.bootsessionuuid")
	if err != nil {
		return ""
	}
	return id
}
